"""Refuse requests to the demo page that another site's page makes in the reader's browser, and what it never needs.

A page of any site can let a name of its own point to 127.0.0.1 (DNS rebinding), or post to this server from its own
origin. So the Host of a request must be an address or a name of this machine, and the Origin of one that changes
something must be the page itself. Uploads, which Gradio always accepts, and large bodies are refused.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketClose

MAX_BODY_BYTES = 1 << 20
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class RequestGuard:
    """ASGI middleware.

    Args:
        host: the name or address that the server listens at, which is allowed as well.
    """

    def __init__(self, app, host: str):
        self.app = app
        self.names = {"localhost", socket.gethostname().lower(), host.lower()}

    async def __call__(self, scope, receive, send) -> None:
        app = self.app
        if scope["type"] == "websocket":  # the page has none
            app = WebSocketClose(code=1008)
        elif scope["type"] == "http" and (refused := self.refuse(scope["method"], scope["path"], Headers(scope=scope))):
            app = JSONResponse({"error": refused[1]}, status_code=refused[0])
        await app(scope, receive, send)

    def refuse(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the reason to refuse a request with; None to accept it."""
        host = headers.get("host", "")
        if not self._is_this_machine(host):
            return 403, f"this page is not served as {host[:100]!r}: open it by the address that the demo printed"
        if method in SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "requests from pages of other sites are refused"
        if path.rstrip("/").endswith("/upload"):
            return 403, "the demo takes no files"
        length = headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return 413, f"this is too long: a request needs a Content-Length of at most {MAX_BODY_BYTES:,} bytes"
        return None

    def _is_this_machine(self, host: str) -> bool:
        """Check the value of a Host header: an IP address cannot be rebound, and of names only ours are allowed."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False
