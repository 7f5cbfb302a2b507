"""`python -m tests.kubernetes_server`: serve until the parent process is gone; writes a kubeconfig."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
from pathlib import Path

from aiohttp import web

from tests.kubernetes_server.api import Server
from tests.kubernetes_server.faults import Faults
from tests.kubernetes_server.local import clear_cgroups

KUBECONFIG = """apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: test, user: {user}}}]
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: deepswe}}}}]
"""


async def serve(arguments: argparse.Namespace) -> None:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # connections that are cut on purpose
    server = Server(Faults(**json.loads(arguments.faults)), arguments.simulate, arguments.token, arguments.warm)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", arguments.port)
    await site.start()
    port = runner.addresses[0][1]
    ready = arguments.kubeconfig.with_suffix(".part")
    user = json.dumps({"token": arguments.token} if arguments.token else {})
    ready.write_text(KUBECONFIG.format(port=port, user=user))
    ready.rename(arguments.kubeconfig)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    parent = os.getppid()
    while not stop.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue
    await server.close()
    await runner.cleanup()
    clear_cgroups()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="file to write")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default="", help="bearer token to ask for (kubectl sends none without TLS)")
    parser.add_argument("--simulate", action="store_true", help="pods that are not there")
    parser.add_argument("--warm", action="store_true", help="agent-sandbox is installed")
    parser.add_argument("--faults", default="{}", help="JSON: kind -> rate")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
