"""Plays any process of the engine in the tests of `rankbus serve`: `stand_in.py ROLE [--index N]`.

A frontend answers /health as soon as the file `ready` lies in run_dir. What else a process does, a file named after it
says: `rank-0.exit` holds the code to end with, `rank-0.refuse` the sentence of a configuration that cannot be used.
"""

import http.server
import signal
import sys
import threading

from bus import log, process
from bus.config import Config, ConfigError
from bus.links import Identity


def run(config: Config, me: Identity) -> None:
    """Do what the files in run_dir say, and otherwise nothing until SIGTERM comes."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=ended.set).start())
    name = f"{me.role}-{me.index}"
    log.get_logger().info("the stand-in runs")
    refuse, exit_code = config.run_path / f"{name}.refuse", config.run_path / f"{name}.exit"
    if refuse.exists():
        raise ConfigError(refuse.read_text())
    if exit_code.exists():
        sys.exit(int(exit_code.read_text()))
    if me.role == "frontend":
        ready = config.run_path / "ready"

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if ready.exists() else 503)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer((config.host, config.port + me.index), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ended.wait()


if __name__ == "__main__":
    role = sys.argv.pop(1)
    process.main(role, run)  # type: ignore[arg-type]
