from __future__ import annotations

from rlightning.rpc.options import channel_options, server_options
from rlightning.utils.config.rpc import RpcConfig

RPC = RpcConfig()


def test_no_option_is_given_twice():
    for options in (channel_options(RPC), server_options(RPC)):
        assert len(dict(options)) == len(options)


def test_the_server_bears_the_pings_that_the_client_sends():
    client, server = dict(channel_options(RPC)), dict(server_options(RPC))
    interval = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert interval <= client["grpc.keepalive_time_ms"] / 2
    assert server["grpc.keepalive_permit_without_calls"] == 1
    for options in (client, server):
        assert options["grpc.http2.max_pings_without_data"] == 0
        assert options["grpc.http2.ping_timeout_ms"] == 5000


def test_both_directions_have_the_cap():
    for options in (dict(channel_options(RPC)), dict(server_options(RPC))):
        assert options["grpc.max_receive_message_length"] == RPC.max_message_bytes
        assert options["grpc.max_send_message_length"] == RPC.max_message_bytes


def test_ports_are_not_shared_and_proxies_not_asked():
    assert dict(server_options(RPC))["grpc.so_reuseport"] == 0
    client = dict(channel_options(RPC))
    assert client["grpc.enable_http_proxy"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1
    assert client["grpc.initial_reconnect_backoff_ms"] == 100
    assert client["grpc.max_reconnect_backoff_ms"] == 1000
