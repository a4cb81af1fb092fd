"""From rows in memory to answers on the host, as a policy server takes them; alike on CPU and CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.policy import LocalPolicy, PolicyHost, build_policy, policy_weights
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.weight_store import Weights
from rlightning.policy.weights import dump_weights, load_weights
from rlightning.types import EnvMeta, EnvRet, Mode
from rlightning.utils.config import Config, PolicyConfig

PICTURES = gym.spaces.Box(0, 255, (4, 12, 12), np.uint8)
META = EnvMeta("a", gym.spaces.Discrete(3), PICTURES, 5)
CNN = {"convolutions": [[4, 4, 2], [8, 3, 1]], "features": 16, "hidden": []}
NEEDS_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
)


def config(**more: Any) -> PolicyConfig:
    made = PolicyConfig(**{"seed": 2, "max_batch_rows": 8, "initial_weights": "random", **more})
    return made.model_copy(update={"model_cfg": Config(**CNN)})


def network(**more: Any) -> Any:
    policy = build_policy(config(**more), "eval")
    policy.init_eval(env_meta=META)
    return policy


def pictures(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, *PICTURES.shape), np.uint8)


def tolerance(device: str) -> float:
    return 1e-5 if device == "cpu" else 1e-3


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", "arrays"),
        ("cpu", "tensors"),
        *(pytest.param("cuda", kind, marks=NEEDS_CUDA) for kind in ("arrays", "tensors", "pinned")),
    ],
)
def test_a_batch_that_is_gathered_beside_another_one_is_answered_alike(
    device: str, kind: str
) -> None:
    policy, reference = network(device=device), network(device="cpu")
    inference, layout = Inference(policy, InputLayout(PICTURES)), InputLayout(PICTURES)
    expected = Inference(reference, layout)

    def parts(seed: int, *, plain: bool = False) -> list[Part]:
        made = []
        for rows in (3, 2) if kind != "pinned" else (5,):
            values, count = layout.flatten(EnvRet("a", pictures(rows, seed + rows)))
            if kind != "arrays" and not plain:
                values = [torch.from_numpy(one) for one in values]
                values = [one.pin_memory() for one in values] if kind == "pinned" else values
            made.append(Part("a", values, count))
        return made

    with ThreadPoolExecutor(1) as gatherer:
        answer = inference.gather(parts(0), Mode.EXPLOIT)
        for seed in range(6):
            beside = (parts(seed + 1), Mode.EXPLOIT)
            ahead = gatherer.submit(inference.gather, *beside) if device == "cuda" else None
            got = answer()
            answer = inference.gather(*beside) if ahead is None else ahead.result()
            wanted = expected.run(parts(seed, plain=True), Mode.EXPLOIT)
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one.value, other.value, atol=tolerance(device))


@pytest.mark.parametrize(
    ("device", "mode"),
    [("cpu", "none"), pytest.param("cuda", "reduce-overhead", marks=NEEDS_CUDA)],
)
async def test_a_host_answers_alike_in_all_sizes_and_with_each_version(
    device: str, mode: str
) -> None:
    """On CUDA by graphs, which the thread of the host makes; they must see new weights, too."""
    host = PolicyHost(config(device=device, compile=mode))
    await host.start()
    try:
        local = LocalPolicy(host, META)
        await local.start()
        for version in (1, 2):
            reference = network(device="cpu", seed=version)
            tensors = {name: t.clone() for name, t in policy_weights(reference).items()}
            await host.publish(Weights.of(version, dump_weights(tensors)))
            load_weights(reference, tensors)
            expected = Inference(reference, InputLayout(PICTURES))
            for rows in (1, 3, 8, 5, 1, 12):
                ret = EnvRet("a", pictures(rows, rows))
                got = await local.act(ret, mode=Mode.EXPLOIT)
                (wanted,) = expected.run(
                    [Part("a", *InputLayout(PICTURES).flatten(ret))], Mode.EXPLOIT
                )
                assert got.policy_version == version
                np.testing.assert_allclose(got.value, wanted.value, atol=tolerance(device))
    finally:
        await host.close()
