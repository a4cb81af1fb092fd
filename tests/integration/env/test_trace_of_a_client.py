"""The trace of a client is that of all that is done for its env."""

from rlightning.env.remote_env import RemoteEnvClient
from rlightning.rpc.trace_context import parse_traceparent, use_trace
from tests.integration.env.attaching import Counting, attached, cluster, stepped
from tests.log_lines import written_lines

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Traced(RemoteEnvClient):
    def run(self):
        use_trace(parse_traceparent(f"00-{TRACE}-00f067aa0ba902b7-01"))
        super().run()


async def test_sessions_that_are_opened_for_a_client_are_of_its_trace():
    with written_lines() as lines:
        async with cluster() as running:
            async with attached(running.env_address, Counting(), kind=Traced) as client:
                await stepped(client, 20)
        opened = [line for line in lines() if " opened session " in line["message"]]
    traced = {line["method"].rpartition("/")[2] for line in opened if line.get("trace_id") == TRACE}
    assert traced == {"Attach", "Act", "Insert"}
    assert {line["env_id"] for line in opened if "trace_id" in line} == {
        *("robot", "attached/robot"),
    }
    # The env that the server hosts itself is of no trace.
    assert any("trace_id" not in line for line in opened)
