"""Stands in for the process that drives Ray: places nodes without a model, on threads of its own. A node's settings say how it fares."""

import os
import socket
import sys
import time
from pathlib import Path

from engine_bridge.cluster import orders
from engine_bridge.cluster.host import NodeAddress, NodeHost
from engine_bridge.cluster.orders import ClusterSettings, NodeToStart
from engine_bridge.cluster.placed_node import RETRY_S
from engine_bridge.cluster.wire import REPORT_EVERY_S
from tests.unit.gateway.fake_node import Breakable

AWAY = "the model is away"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("rb")

    def tell(news: orders.News) -> None:
        control.sendall(orders.line_of(news))

    begin = orders.order_of(lines.readline())
    assert isinstance(begin, orders.Begin)
    settings = begin.settings
    tell(orders.StartStage("starting the stand-in"))
    nodes = {node.node_id: node for node in settings.nodes}
    for node in nodes.values():
        place(node, settings, tell)
    if settings.follows_all:
        places = {"folder": settings.folder, "turns": f"{settings.folder}/t"}
        place(NodeToStart(node_id="of-others", settings=b"", **places), settings, tell)
    for line in lines:
        match orders.order_of(line):
            case orders.Restart(node_id=node_id) | orders.Kill(node_id=node_id):
                if nodes[node_id].settings == b"takes its time to close":
                    fakes[node_id].state = "closed"
                    time.sleep(2 * REPORT_EVERY_S)
                tell(orders.Placed(node_id, None))
                hosts[node_id].close()
                place(nodes[node_id], settings, tell)
            case orders.Remove(node_id=node_id):
                tell(orders.NodeLeft(node_id))
            case orders.Close():
                break


hosts: dict[str, NodeHost] = {}
fakes: dict[str, Breakable] = {}


def place(node: NodeToStart, settings: ClusterSettings, tell) -> None:  # type: ignore[no-untyped-def]
    if node.settings == b"no cluster":
        tell(orders.ClusterFailed("there is no cluster"))
        os._exit(1)
    if node.settings == b"cannot be made":
        tell(orders.Placed(node.node_id, None, "it has no model"))
        return
    if node.settings == b"never comes up":
        return
    fake = fakes[node.node_id] = Breakable(["I am ", node.node_id], Path(node.folder) / AWAY)
    if node.settings == b"another model":
        fake.model_names = ("another-model",)
    if node.settings == b"names no place at first":
        nowhere = NodeAddress(host=settings.host, port=70_000, incarnation="odd", pid=os.getpid())
        tell(orders.Placed(node.node_id, nowhere))
        time.sleep(2 * RETRY_S)
    places = {"folder": Path(node.folder), "turns": Path(node.turns)}
    hosts[node.node_id] = NodeHost(lambda: (fake, ""), node.node_id, settings.host, settings.trust, **places)
    tell(orders.Placed(node.node_id, hosts[node.node_id].start()))


if __name__ == "__main__":
    main()
