"""One Docker engine with the images built, for all tests here."""

import time

import pytest

from tests.docker.stack import Stack, engine


@pytest.fixture(scope="session", autouse=True)
def built():
    """An engine with the images built."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for service in ("ENV", "POLICY", "BUFFER", "DASHBOARD"):
            monkeypatch.setenv(f"{service}_PORT", "0")  # any: another stack may run here
        with engine(monkeypatch):
            began = time.monotonic()
            Stack()("build", timeout_s=800)
            print(f"built in {time.monotonic() - began:.0f} s")
            yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Shows what the containers said when a test fails, while they are there."""
    report = yield
    if report.when == "call" and report.failed:
        report.sections.append(("containers", Stack().last_words()))
    return report
