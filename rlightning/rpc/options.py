"""Channel and server options: both halves in one place, since they must fit each other."""

from __future__ import annotations

from rlightning.utils.config.rpc import RpcConfig

Option = tuple[str, int | str]


def _shared_options(rpc: RpcConfig) -> list[Option]:
    keepalive_ms = int(rpc.keepalive_time_s * 1000)
    timeout_ms = int(rpc.keepalive_timeout_s * 1000)
    return [
        ("grpc.max_receive_message_length", rpc.max_message_bytes),
        ("grpc.max_send_message_length", rpc.max_message_bytes),
        # Only the identity: 80 KB of gzip may hold a message as large as the cap, and a dozen of
        # those at once took 840 MiB and left pings unanswered.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # keepalive_timeout_ms alone does not act: without this a frozen peer is noticed after a
        # minute (grpc/grpc#39239).
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        # Pings go on for as long as a stream stays idle.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # What is received, in spite of the name: a peer that pings more often than this is cut with
        # too_many_pings. Half the time that both sides use leaves room for jitter.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
    ]


def channel_options(rpc: RpcConfig) -> list[Option]:
    """Returns the options of every client channel."""
    return [
        *_shared_options(rpc),
        ("grpc.initial_reconnect_backoff_ms", rpc.reconnect_initial_ms),
        # In spite of its name: how long one connection attempt may take.
        ("grpc.min_reconnect_backoff_ms", rpc.connect_timeout_ms),
        ("grpc.max_reconnect_backoff_ms", rpc.reconnect_max_ms),
        # Channels with equal options share a connection, and its backoff, unless told otherwise.
        ("grpc.use_local_subchannel_pool", 1),
        # The proxy of an office network would be asked for addresses on the robot's own.
        ("grpc.enable_http_proxy", 0),
        # Sessions resume their streams; a retry by gRPC would only blur whose turn it is.
        ("grpc.enable_retries", 0),
    ]


def server_options(rpc: RpcConfig) -> list[Option]:
    """Returns the options of every server."""
    return [
        *_shared_options(rpc),
        # On by default: a second server would bind the same port and take half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", 16 * 1024),
    ]
