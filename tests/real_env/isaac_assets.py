"""USD assets for Isaac's pendulums, made from those that come with Newton."""

from __future__ import annotations

from pathlib import Path


def single_pendulum(folder: Path) -> Path:
    """A cart with a pole; its joints have the names that Isaac's Cartpole wants."""
    stage = _opened("cartpole_single_pendulum.usda")
    stage.SetDefaultPrim(stage.GetPrimAtPath("/cartpole"))
    return _exported(stage, folder / "cartpole.usda")


def double_pendulum(folder: Path) -> Path:
    """A cart with two poles, for Isaac's multi-agent pendulum."""
    from pxr import Sdf

    stage = _opened("cartpole.usda")
    layer = stage.GetRootLayer()
    names = {
        "railCartJoint": "slider_to_cart",
        "cartPoleJoint": "cart_to_pole",
        "polePoleJoint": "pole_to_pendulum",
    }
    edit = Sdf.BatchNamespaceEdit()
    for prim in stage.Traverse():
        if prim.GetName() in names:
            edit.Add(Sdf.NamespaceEdit.Rename(prim.GetPath(), names[prim.GetName()]))
    for path in ("/SphereLight", "/physicsScene"):
        if stage.GetPrimAtPath(path):
            edit.Add(Sdf.NamespaceEdit.Remove(path))
    assert layer.Apply(edit)
    return _exported(stage, folder / "double_pendulum.usda")


def _opened(name):
    import newton
    from pxr import Usd

    return Usd.Stage.Open(str(Path(newton.__file__).parent / "examples" / "assets" / name))


def _exported(stage, path):
    stage.Export(str(path))
    return path
