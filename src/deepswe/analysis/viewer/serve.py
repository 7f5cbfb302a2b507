"""The viewer from a small server on this machine's own address, for runs that are too big for one file."""

from __future__ import annotations

import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from deepswe.analysis.record import RunRecord
from deepswe.analysis.viewer.data import Book
from deepswe.analysis.viewer.page import render_page
from deepswe.errors import RunError

HOST = "127.0.0.1"


class ViewerServer(ThreadingHTTPServer):
    """Serves one page and its chunks, to those who know the secret in its address. Only GET, only loopback.

    Args:
        run, book: what is shown.
        port: 0 takes a free one.

    Raises:
        RunError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: RunRecord, book: Book, *, port: int = 0) -> None:
        self.secret = secrets.token_urlsafe(16)
        self.page = b"".join(render_page(run, book, served=True))
        self.chunks = book.chunks
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise RunError(f"port {port} cannot be used: {error.strerror}; give another --port, or none") from error

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    def answer(self, path: str, host: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body of a request.

        Args:
            path: of the address, as it came.
            host: the header, which a page of somebody else's cannot forge.
        """
        if host not in (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"):
            return HTTPStatus.FORBIDDEN, "text/plain", b"only for this machine\n"
        root = f"/{self.secret}/"
        if not secrets.compare_digest(path[: len(root)].encode(), root.encode()):
            return HTTPStatus.NOT_FOUND, "text/plain", b"nothing here\n"
        rest = path[len(root) :]
        if rest == "":
            return HTTPStatus.OK, "text/html; charset=utf-8", self.page
        number = rest.removeprefix("chunk/")
        if rest.startswith("chunk/") and number.isascii() and number.isdigit() and int(number) < len(self.chunks):
            return HTTPStatus.OK, "application/octet-stream", self.chunks[int(number)]
        return HTTPStatus.NOT_FOUND, "text/plain", b"nothing here\n"


class _Handler(BaseHTTPRequestHandler):
    server: ViewerServer

    def do_GET(self) -> None:
        status, kind, body = self.server.answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
