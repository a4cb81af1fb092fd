"""What `rlightning doctor` finds, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlightning.cluster.camera_fit import SHARE, CameraFit
from rlightning.cluster.progress import duration
from rlightning.rpc.link import Link

Status = Literal["ok", "note", "warning", "error"]

_STYLES = {"ok": "green", "note": "", "warning": "yellow", "error": "bold red"}
# Above it, nobody asks for more.
_ENOUGH_FPS = 240.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        status: `ok`; `note`, which is worth knowing; `warning`, which will hurt; `error`.
        check: What was looked at: `config`, `reach`, `health`, `access`, `version`, `clock`,
            `link`, `spec`, `envs` or `limits`.
        where: Service or key; empty for the whole.
        message: What was found.
        fix: What to do about it; empty where all is `ok`.

    Raises:
        ValueError: Something is not `ok`, and nothing says what to do about it.
    """

    status: Status
    check: str
    where: str
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status != "ok" and not self.fix:
            raise ValueError(f"a finding that is not ok needs a fix: {self.message}")


@dataclass(frozen=True)
class Diagnosis:
    """All that was found.

    Attributes:
        findings: In the order of looking.
        links: What was measured, by service.
        cameras: What fits the link to the env server; empty where it was not measured.
    """

    findings: Sequence[Finding]
    links: Mapping[str, Link] = field(default_factory=dict)
    cameras: Sequence[CameraFit] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.status != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON: the attributes, and `ok`."""
        return {"ok": self.ok, **asdict(self)}


def text_of(diagnosis: Diagnosis) -> RenderableType:
    """Returns the findings with their fixes, and the table of cameras."""
    parts: list[RenderableType] = []
    for finding in diagnosis.findings:
        line = Text(f"{finding.status:8}", style=_STYLES[finding.status])
        where = f"{finding.where}: " if finding.where else ""
        line.append(f"{finding.check:8}{where}{finding.message}", style="")
        parts.append(line)
        if finding.fix:
            parts.append(Text(f"{'':16}-> {finding.fix}"))
    if diagnosis.cameras:
        parts += [Text(), *_cameras(diagnosis)]
    counts = {
        status: sum(finding.status == status for finding in diagnosis.findings)
        for status in ("error", "warning")
    }
    told = ", ".join(f"{count} {status}{'s' * (count != 1)}" for status, count in counts.items())
    return Group(*parts, Text(), Text(told, style="bold"))


def _cameras(diagnosis: Diagnosis) -> list[RenderableType]:
    encodings = list(dict.fromkeys(fit.encoding for fit in diagnosis.cameras))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("one camera", no_wrap=True)
    for encoding in encodings:
        table.add_column(encoding, justify="right", no_wrap=True)
    by_size: dict[str, list[CameraFit]] = {}
    for fit in diagnosis.cameras:
        by_size.setdefault(f"{fit.width}x{fit.height}", []).append(fit)
    for size, fits in by_size.items():
        table.add_row(size, *map(_fps, fits))
    heading = (
        f"frames per second that fit into {SHARE:.0%} of the link to the env server, and how long "
        "each is on the line"
    )
    lines: list[RenderableType] = [Text(heading), table]
    if len(encodings) > 1:
        lines.append(Text("png and jpeg as measured on a test picture; yours may be smaller"))
    else:
        lines.append(Text("png and jpeg: pip install 'rlightning[robot]', and run this again"))
    return lines


def _fps(fit: CameraFit) -> str:
    if fit.max_fps > _ENOUGH_FPS:
        return f">{_ENOUGH_FPS:.0f}/s"
    rate = f"{fit.max_fps:.0f}" if fit.max_fps >= 10 else f"{fit.max_fps:.1f}"
    return f"{rate}/s {duration(fit.frame_s)}"
