import asyncio
import json

import pytest

from rlightning.cluster.dashboard.feed import Feed


def data_of(event):
    name, _, rest = event.decode().partition("\n")
    assert event.endswith(b"\n\n")
    return name.removeprefix("id: "), json.loads(rest.strip().removeprefix("data: "))


def feed_of(count):
    feed = Feed(("time", "steps"))
    for number in range(count):
        feed.publish({"at": number}, (float(number), None))
    return feed


async def test_who_comes_late_gets_all_points_and_the_newest_state():
    _, data = data_of(feed_of(3).event(0))
    assert data == {
        "state": {"at": 2},
        "fresh": True,
        "columns": ["time", "steps"],
        "points": [[0.0, None], [1.0, None], [2.0, None]],
    }


async def test_who_comes_back_gets_what_was_missed():
    feed = feed_of(3)
    name, _ = data_of(feed.event(0))
    feed.publish({"at": 3}, (3.0, 1.0))
    seen = feed.resume(name)
    _, data = data_of(feed.event(seen))
    assert seen == 3
    assert data["points"] == [[3.0, 1.0]]
    assert data["fresh"] is False


@pytest.mark.parametrize(
    "name", ["", "3", "x-3", "-3", "é-²", "{id}-", "{id}-9x", "{id}-" + "9" * 5000]
)
async def test_a_name_from_elsewhere_starts_anew(name):
    feed = feed_of(3)
    mine = data_of(feed.event(0))[0].partition("-")[0]
    assert feed.resume(name.replace("{id}", mine)) == 0


async def test_a_name_from_the_future_waits_for_what_comes():
    feed = feed_of(3)
    mine = data_of(feed.event(0))[0].partition("-")[0]
    assert feed.resume(f"{mine}-99") == 3


async def test_readers_wait_for_news_and_for_the_end():
    feed = feed_of(1)
    reader = asyncio.create_task(feed.newer(1))
    await asyncio.sleep(0)
    assert not reader.done()
    feed.publish({}, (1.0, 2.0))
    await reader
    last = asyncio.create_task(feed.newer(2))
    await asyncio.sleep(0)
    feed.end()
    await last
    assert feed.ended


async def test_many_readers_share_one_event():
    feed = feed_of(3)
    assert feed.event(2) is feed.event(2)


async def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected 2 figures, got 1"):
        feed_of(0).publish({}, (1.0,))
    feed = Feed(("time",))
    feed.publish({}, (float("nan"),))
    with pytest.raises(ValueError, match="JSON"):
        feed.event(0)
