"""Ports that are shut once everybody is there, and the meeting before."""

import contextlib
import datetime
import gc
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from adl_dist.distributed import network, torchrun_backend
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER, USER_ERROR_FILE, flag_user_error
from adl_dist.distributed.rendezvous import barrier_on_attempt, listen_at, rendezvous, store_on
from adl_dist.distributed.torchrun_backend import make_handler
from adl_dist.errors import ChannelError, ConfigError
from adl_dist.transport.port_filter import block, blocking_new, unblock
from tests.support.ports import free_port

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="ports are shut by the Linux kernel")

LONG_ENOUGH = datetime.timedelta(seconds=20)
SHORT = datetime.timedelta(seconds=0.2)


def listening():
    return listen_at("127.0.0.1", 0)


def lets_in(listener, *, seconds=0.1):
    try:
        socket.create_connection(listener.getsockname(), timeout=seconds).close()
    except TimeoutError:
        return False
    return True


@on_linux
def test_a_shut_port_keeps_its_connections_and_answers_no_other():
    with listening() as listener, socket.create_connection(listener.getsockname()) as friend:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1, port {port}: .* in use; choose"):
            listen_at("127.0.0.1", port)
        inside, _ = listener.accept()
        block(listener)
        assert not lets_in(listener)
        with inside:
            friend.sendall(b"still here")
            assert inside.recv(100) == b"still here"
        unblock(listener)
        assert lets_in(listener)


@on_linux
def test_what_begins_to_listen_inside_is_shut_behind():
    with listening() as before, contextlib.ExitStack() as lasting:
        with blocking_new():
            inside = [lasting.enter_context(listening()) for _ in range(2)]
            inside[1].setblocking(False)
        assert [os.get_blocking(one.fileno()) for one in inside] == [True, False]
        assert [lets_in(one) for one in (*inside, before)] == [False, False, True]


@on_linux
def test_the_store_of_rank_0_serves_who_came_before_it_was_shut():
    with listening() as listener:
        store = store_on(listener, LONG_ENOUGH)
        _, port = listener.getsockname()
        friend = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG_ENOUGH)
        block(listener)
        store.set("key", "value")
        assert friend.get("key") == b"value"
        with pytest.raises(RuntimeError, match="timed out"):
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SHORT)


@pytest.mark.parametrize("named", [None, network.GLOO, network.RPC])
def test_a_named_interface_is_that_of_all_transports(named, monkeypatch):
    """A named interface is that of all transports and none is loopback on one node."""
    variables = (network.GLOO, network.RPC, network.NCCL)
    for variable in variables:
        monkeypatch.setenv(variable, "")  # so that it is as before afterwards
        monkeypatch.delenv(variable)
    chosen = network.interfaces()[-1] if named else network.loopback()
    if named:
        monkeypatch.setenv(named, chosen)
    network.choose_interface(size=2)
    assert [os.environ[variable] for variable in variables] == [chosen, chosen, f"={chosen}"]
    monkeypatch.setenv(network.GLOO, "nosuch0")
    with pytest.raises(ConfigError, match=f"{network.GLOO}=nosuch0, but .* has no network interface nosuch0; it has "):
        network.choose_interface(size=2)


@pytest.fixture
def first_node(monkeypatch):
    """This is node1 of several, where its own name means loopback; they are joined by an interface that is named."""
    address_of_host = network.address_of_host

    def of_this_node(host):
        return (socket.AF_INET, "127.0.1.1") if host == "node1" else address_of_host(host)

    monkeypatch.setattr(network, "address_of_host", of_this_node)
    monkeypatch.setattr(network, "address_of", lambda name: "127.0.0.1")
    monkeypatch.delenv(network.RPC, raising=False)
    for variable, value in ((network.GLOO, "fast0"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "node1")):
        monkeypatch.setenv(variable, value)
    for variable in (RENDEZVOUS_FOLDER, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(variable, raising=False)


def test_a_node_named_loopback_meets_itself_where_others_meet_it(first_node, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with ThreadPoolExecutor() as ranks:
        (store, listener), (other, _) = ranks.map(lambda rank: rendezvous(rank, 2, LONG_ENOUGH), (0, 1))
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        store.set("key", "value")
        assert other.get("key") == b"value"


@pytest.fixture
def agent(monkeypatch):
    """Makes the handler of one of two of torchrun's agents, by its address."""
    endpoint = f"127.0.0.1:{free_port()}"
    for variable in (USER_ERROR_FILE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(variable, "")
    return lambda at, **more: make_handler(RendezvousParameters("adl-dist", endpoint, "run", 2, 2, at, **more))


def test_the_node_of_the_endpoint_has_rank_0(agent):
    handlers = [agent("127.0.0.9"), agent("127.0.0.10")]
    with ThreadPoolExecutor() as nodes:
        joined = [*nodes.map(lambda handler: handler.next_rendezvous(), handlers)]
    assert [one.rank for one in joined] == [0, 1]
    assert {one.bootstrap_store_info.master_addr for one in joined} == {"127.0.0.9"}


def test_an_agent_ends_in_one_line(agent, capsys, monkeypatch):
    handler = agent("127.0.0.9", join_timeout=1)
    with pytest.raises(SystemExit):
        handler.next_rendezvous()
    assert "not all 2 nodes at 127.0.0.1:" in capsys.readouterr().err
    monkeypatch.setattr(torchrun_backend, "TELL_SECONDS", 0)
    flag_user_error("the data are missing")
    with pytest.raises(SystemExit):
        handler.next_rendezvous()
    assert "a restart would meet the same error" in capsys.readouterr().err
    other = agent("127.0.0.10")
    handler.shutdown()
    with pytest.raises(SystemExit):
        other.num_nodes_waiting()
    assert capsys.readouterr().err == "adl-dist: error: rank 0: the data are missing\n"


def test_the_other_agents_say_that_the_first_one_is_gone(agent, capfd):
    first, other = agent("127.0.0.9"), agent("127.0.0.10")
    first.set_closed()
    del first  # and with it the server of the store
    gc.collect()
    with pytest.raises(SystemExit) as end:
        other.num_nodes_waiting()
    assert end.value.code == 1
    assert "where all others meet, is gone; give the same command again on all nodes" in capfd.readouterr().err


def agreed(store, order):
    """What the ranks, started one after the other, take for the name of their attempt."""
    calls = []
    with ThreadPoolExecutor() as ranks:
        for rank in order:
            calls.append(ranks.submit(barrier_on_attempt, store, rank, len(order), LONG_ENOUGH))
            time.sleep(0.05)  # the next one comes late
    return {call.result() for call in calls}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_every_attempt_in_one_store_has_a_name_of_its_own(order):
    """The store holds all that the dead have written: their names, their list, and that all had confirmed it."""
    store = dist.HashStore()
    attempts = [agreed(store, order) for _ in range(3)]
    assert [len(names) for names in attempts] == [1, 1, 1]
    assert len(set.union(*attempts)) == 3


def test_no_rank_takes_a_dead_one_for_the_living():
    """And who never came is named."""
    store = dist.HashStore()
    agreed(store, [0, 1])
    for rank in (0, 1):
        with pytest.raises(ChannelError, match=f"rank {rank} waited 0.2 s .* and one of them has died meanwhile"):
            barrier_on_attempt(store, rank, 2, SHORT)
    with pytest.raises(ChannelError, match=r"rank 0 waited 0.2 s for all 3 .*, and rank 1, 2 never did"):
        barrier_on_attempt(dist.HashStore(), 0, 3, SHORT)
