"""Section `log`: what is written where."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.utils.config.base import Config

_COLLECTOR = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):[0-9]{1,5}/?")


class LogConfig(Config):
    """What is written where.

    Attributes:
        level: Least important log lines to write.
        format: How services write them: `human`; `json`, one object a line; or `auto`, for people
            on a terminal and into a file, and JSON into a pipe.
        backend: Where scalars go: `tensorboard` files in the run's folder, or nowhere (`none`). The
            documented `wandb` and `swanlab` write such files too, and a note names the key.
        project: Documented; names nothing here.
        name: Name of the run: its folder is `<log_dir>/<name>/<n>`; None: the name of the first
            env.
        log_dir: Folder of all runs.
        mode: Documented; no effect here.
        latency: Measure how long each stage takes.
        trace_every: Trace every so many steps of each group into `trace.json` of the run's folder,
            which Perfetto shows; 0: none.
        otlp_endpoint: URL of a collector of OpenTelemetry, such as http://127.0.0.1:4317, to which
            env servers send what they trace as spans, by OTLP over gRPC; None: nowhere. Needs the
            extra `otel`.
    """

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["auto", "human", "json"] = "auto"
    backend: Literal["tensorboard", "wandb", "swanlab", "none"] = "tensorboard"
    project: str | None = None
    name: str | None = None
    log_dir: str = "runs"
    mode: str | None = None
    latency: bool = True
    trace_every: int = Field(default=0, ge=0)
    otlp_endpoint: str | None = None

    @field_validator("otlp_endpoint")
    @classmethod
    def check_otlp_endpoint(cls, endpoint: str | None) -> str | None:
        """Refuses what is no URL of a collector."""
        if endpoint is not None and _COLLECTOR.fullmatch(endpoint) is None:
            raise ValueError(f"expected http://HOST:PORT or https://HOST:PORT, got {endpoint!r}")
        return endpoint

    @model_validator(mode="after")
    def check_traces(self) -> Self:
        """Refuses to send what is not there."""
        if self.otlp_endpoint is not None and not (self.trace_every and self.latency):
            raise ValueError(
                "otlp_endpoint: nothing is traced: set log.trace_every, and leave log.latency on"
            )
        return self

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str | None) -> str | None:
        """Refuses a name that is not the name of one folder."""
        if name is not None and (not name or name in {".", ".."} or "/" in name or "\0" in name):
            raise ValueError(f"expected the name of a folder, got {name!r}")
        return name
