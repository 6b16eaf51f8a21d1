import asyncio

import pytest

from engine_bridge.driver.serving.call import Call
from engine_bridge.driver.serving.entrance import Entrance


async def test_a_few_calls_of_a_tenant_are_made_ready_at_a_time_and_others_come_when_they_have_left() -> None:
    entrance = Entrance(num_at_once=2)
    first, second = [await entrance.enter("a") for _ in range(2)]
    third, stops = (asyncio.create_task(entrance.enter("a")) for _ in range(2))
    (await entrance.enter("b"))()  # another tenant's calls do not wait for them
    assert not third.done()
    stops.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stops
    first()
    first()  # a second time gives no second place
    leave = await third
    fourth = asyncio.create_task(entrance.enter("a"))
    await asyncio.sleep(0)
    assert not fourth.done()
    leave()
    second()
    (await fourth)()
    assert not entrance._tenants


async def test_a_call_leaves_the_entrance_as_soon_as_its_request_is_queued_or_has_failed() -> None:
    entrance = Entrance(num_at_once=1)
    Call(when_known=await entrance.enter("a")).queued()
    Call(when_known=await entrance.enter("a")).failed(ValueError("bad"))
    assert not entrance._tenants
