import pytest

from rlightning.cli.options import client_auth, with_dashboard_address
from rlightning.utils.config import ClientAuthConfig

DEFAULT = "127.0.0.1:50050"
NOTHING = dict.fromkeys(("token", "token_file", "ca", "cert", "key"))


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


def test_without_options_the_auth_is_that_of_the_config():
    assert client_auth(**NOTHING) is None
    assert client_auth(**{**NOTHING, "token": "t"}) == ClientAuthConfig(token="t")
    assert client_auth(**{**NOTHING, "ca": "ca.pem"}) == ClientAuthConfig(ca_file="ca.pem")
