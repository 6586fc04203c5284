"""Stores for the tests: one embedded and one over gRPC for the whole session, and daemons of one's own."""

import pytest
import torch
from daemon import Kvferryd

import kvferry

torch.set_num_threads(1)  # the models are tiny: more threads cost more than they give


def pytest_collection_modifyitems(items):
    """Nothing may hang: every test has a limit of its own or this one."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def embedded_store():
    with kvferry.connect("embedded://", memory="256MiB") as store:
        yield store


@pytest.fixture(scope="session")
def grpc_store(tmp_path_factory):
    with Kvferryd(tmp_path_factory.mktemp("kvferryd")) as daemon, kvferry.connect(daemon.url) as store:
        yield store


@pytest.fixture(params=["embedded", "grpc"])
def store(request):
    """Each data plane in turn."""
    return request.getfixturevalue(f"{request.param}_store")


@pytest.fixture
def kvferryd(tmp_path):
    """A daemon of this test's own, which it may kill."""
    with Kvferryd(tmp_path) as daemon:
        yield daemon
