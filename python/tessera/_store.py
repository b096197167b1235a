"""torch.distributed's "env://" meets on the job's own store, which asks for the job's secret."""

from __future__ import annotations

import functools
import importlib
import os
import socket
from datetime import timedelta
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from tessera import _C

# By its name: torch.distributed has a function of the same one.
rendezvous = importlib.import_module("torch.distributed.rendezvous")


def _environment_of(url: str):
    """The environment of this process, if a launcher gave it one and `url` means it."""
    try:
        environment = _C.read_environment()
    except ValueError:
        return None  # torch says what is wrong with it
    query = dict(parse_qsl(urlparse(url).query))
    asked = (int(query.get("rank", environment.rank)), int(query.get("world_size", environment.world_size)))
    is_meant = environment.launcher == "torchrun" and asked == (environment.rank, environment.world_size)
    return environment if is_meant else None


def _has_secret() -> bool:
    return any(os.environ.get(name) for name in ("TESSERA_JOB_SECRET_FILE", "TESSERA_JOB_SECRET"))


def _listen_narrowly(environment):
    """A store that torch's own, on the same port of this process, shares; None if it needs none.

    Left to itself torch would listen on every interface, whatever address it is given.
    """
    if environment.agent_store or environment.rank != 0:
        return None
    address, port = environment.master_addr, environment.master_port
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family, backlog=2048)
    except OSError:
        return None  # shared already, or torch says what is wrong
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _prefer_own_store(torch_handler):
    @functools.wraps(torch_handler)
    def handler(url, timeout=rendezvous.default_pg_timeout, **kwargs):
        environment = _environment_of(url)
        if environment is None or not (environment.store or _has_secret()):
            shared = None
            if environment is not None:
                _C.check_open_store(environment)
                shared = _listen_narrowly(environment)
            torchs = torch_handler(url, timeout, **kwargs)
            found = next(torchs)
            del shared  # torch's holds it now
            yield found
            yield from torchs
            return
        yield _C.connect_store(environment, timeout), environment.rank, environment.world_size
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")

    handler.is_tesseras = True
    return handler


def register() -> None:
    """Have init_process_group use the job's own store. Calling it again changes nothing."""
    handlers = rendezvous._rendezvous_handlers
    if "env" in handlers and not hasattr(handlers["env"], "is_tesseras"):
        handlers["env"] = _prefer_own_store(handlers["env"])
