from __future__ import annotations

import hashlib
from datetime import datetime, timedelta, timezone

import pytest

from rlightning.errors import ConfigError, UnauthenticatedError
from rlightning.rpc import auth
from rlightning.rpc.auth import TokenEntry, TokenTable, check_listener, is_loopback
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig, RpcConfig, TlsConfig

SECRET = "a-secret-of-sixteen"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.8.0.1:5", True),
        ("[::1]:5", True),
        ("localhost:5", True),
        ("unix:/tmp/s", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("10.0.0.1:5", False),
        ("robot:5", False),
        (":5", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(address, loopback):
    assert is_loopback(address) is loopback


def test_a_listener_beyond_loopback_needs_tls_or_a_word(caplog):
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:5 .*plaintext: true.*--insecure"):
        check_listener(ListenConfig(address="0.0.0.0:5"))
    tls = TlsConfig(cert_file="c", key_file="k")
    check_listener(ListenConfig(address="0.0.0.0:5", tls=tls))
    check_listener(ListenConfig())
    assert caplog.records == []
    check_listener(ListenConfig(address="0.0.0.0:5", plaintext=True))
    assert "plaintext" in caplog.text


def test_tokens_are_found_by_secret_or_hash_and_compared_with_all(monkeypatch):
    entries = [
        TokenEntry(name="one", token=SECRET, scopes=["env"]),
        TokenEntry(
            name="two", sha256=hashlib.sha256(b"other").hexdigest(), scopes=["actor", "learner"]
        ),
    ]
    table = TokenTable(entries)
    compared = []
    compare = auth.hmac.compare_digest
    monkeypatch.setattr(
        auth.hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b)
    )
    assert table.scopes_of(SECRET) == {"env"}
    assert table.scopes_of("other") == {"actor", "learner"}
    with pytest.raises(UnauthenticatedError):
        table.scopes_of("third")
    assert len(compared) == 6


@pytest.mark.parametrize("zone", [None, timezone.utc, timezone(timedelta(hours=9))])
def test_tokens_expire(zone):
    now = datetime.now(zone) if zone else datetime.now(timezone.utc).replace(tzinfo=None)
    minute = timedelta(minutes=1)
    for expires, valid in ((now + minute, True), (now - minute, False)):
        table = TokenTable([TokenEntry(name="one", token=SECRET, scopes=["env"], expires=expires)])
        if valid:
            assert table.scopes_of(SECRET) == {"env"}
        else:
            with pytest.raises(UnauthenticatedError, match="one expired"):
                table.scopes_of(SECRET)


@pytest.mark.parametrize(
    "content",
    [
        "- {name: a, scopes: [env]}",
        "- {name: a, token: short, scopes: [env]}",
        f"- {{name: a, token: {SECRET}, sha256: {'0' * 64}, scopes: [env]}}",
        "- {name: a, sha256: zz, scopes: [env]}",
        f"- {{name: a, token: {SECRET}, scopes: [root]}}",
        f"- {{name: a, token: {SECRET}, scopes: [env], extra: 1}}",
        "name: a",
        "[",
    ],
)
def test_a_bad_token_file_is_named_without_its_secrets(tmp_path, content):
    path = tmp_path / "tokens.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"tokens\.yaml") as raised:
        TokenTable.load(path)
    assert SECRET not in str(raised.value)


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        TokenTable.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read"):
        auth.call_metadata(ClientAuthConfig(token_file=str(tmp_path / "none")))


def test_the_token_is_not_in_the_repr():
    assert SECRET not in repr(ClientAuthConfig(token=SECRET))


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (ClientAuthConfig, {"token": "a", "token_file": "b"}, "not both"),
        (ClientAuthConfig, {"cert_file": "a"}, "belong together"),
        (RpcConfig, {"heartbeat_s": 6}, "at least twice"),
        (RpcConfig, {"reconnect_initial_ms": 2000}, "below reconnect_initial_ms"),
        (RpcConfig, {"max_message_bytes": 2**31}, "max_message_bytes"),
    ],
)
def test_values_that_contradict_each_other_are_refused(kind, values, text):
    with pytest.raises(ConfigError, match=text):
        kind.from_dict(values)
