import pytest

from rlightning.cli.options import with_dashboard_address

DEFAULT = "127.0.0.1:50050"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("config.yaml", "config.yaml"),
        ("config.yaml --dashboard", f"config.yaml --dashboard {DEFAULT}"),
        ("--dashboard config.yaml", f"--dashboard {DEFAULT} config.yaml"),
        ("--dashboard --quiet", f"--dashboard {DEFAULT} --quiet"),
        ("--dashboard 0.0.0.0:80 config.yaml", "--dashboard 0.0.0.0:80 config.yaml"),
        ("--dashboard 8080", "--dashboard 8080"),
        ("--dashboard [::1]:0", "--dashboard [::1]:0"),
        ("--dashboard=here", "--dashboard=here"),
        ("--dashboard host:port", "--dashboard host:port"),
    ],
)
def test_the_dashboard_may_stand_without_its_address(given, meant):
    assert with_dashboard_address(given.split()) == meant.split()
