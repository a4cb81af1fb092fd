"""What `rlightning keys` makes fits together; that servers and clients take it is tested with Docker."""

import stat
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509

from rlightning.cluster.keys import SCOPES, make_keys
from rlightning.errors import ConfigError, UnauthenticatedError
from rlightning.rpc.auth import TokenTable


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_certificates_are_those_of_the_hosts_and_clients(tmp_path):
    folder = tmp_path / "keys"
    written = make_keys(folder, ["10.0.0.1", "cluster.example"], clients=["robot"], days=30)
    assert {path.name for path in written} == {path.name for path in folder.iterdir()}
    ca, server = certificate(folder / "ca.pem"), certificate(folder / "server.pem")
    robot = certificate(folder / "robot.pem")
    for issued in (server, robot):
        issued.verify_directly_issued_by(ca)
        valid = issued.not_valid_after_utc - datetime.now(timezone.utc)
        assert timedelta(days=29) < valid <= timedelta(days=30)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {
        *("10.0.0.1", "cluster.example", "localhost", "127.0.0.1", "::1")
    }


def test_secrets_are_the_owners_alone(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder, ["host"])
    assert mode(folder) == 0o700
    secret = [folder / "ca.key", *(folder / f"{scope}.token" for scope in SCOPES)]
    assert {mode(path) for path in secret} == {0o600}


def test_each_token_opens_its_scope(tmp_path):
    make_keys(tmp_path / "keys", ["host"])
    table = TokenTable.load(tmp_path / "keys" / "tokens.yaml")
    for scope in SCOPES:
        token = (tmp_path / "keys" / f"{scope}.token").read_text().strip()
        assert table.scopes_of(token) == {scope}
        assert token not in (tmp_path / "keys" / "tokens.yaml").read_text()
    with pytest.raises(UnauthenticatedError):
        table.scopes_of("x" * 43)


def test_a_second_time_renews_certificates_only(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder, ["host"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "env.token").unlink()  # withdrawn
    written = {path.name for path in make_keys(folder, ["host"])}
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"server.pem", "server.key", "env.token", "tokens.yaml"}
    assert written == changed
    certificate(folder / "server.pem").verify_directly_issued_by(certificate(folder / "ca.pem"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hosts": ["10.0.0.1:50051"]}, "--host: expected a name or an IP address, no port"),
        ({"hosts": ["http://host"]}, "--host"),
        ({"clients": ["../robot"]}, "--client"),
        ({"clients": ["ca"]}, "--client"),
        ({"days": 0}, "--days: expected 1 to 3650, got 0"),
    ],
)
def test_what_is_no_name_is_refused_before_anything_is_written(tmp_path, wrong, words):
    with pytest.raises(ConfigError, match=words):
        make_keys(tmp_path / "keys", **({"hosts": ["host"]} | wrong))
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="--out: expected a new folder"):
        make_keys(tmp_path, ["host"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_authority_that_is_none_is_named(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder, ["host"])
    (folder / "ca.key").write_text("nonsense")
    with pytest.raises(ConfigError, match="ca.key: not an authority"):
        make_keys(folder, ["host"])
