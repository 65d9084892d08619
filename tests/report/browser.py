"""A headless Chromium, spoken to over --remote-debugging-pipe (Chrome DevTools Protocol)."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60  # seconds


def program():
    """Where a browser is; None: nowhere."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page at a time. Leaves no process and no file behind."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # The browser reads from 3 and writes to 4: first out of their way.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
        os.close(commands)
        os.close(answers)

        def place():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        arguments = [program(), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                     "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
                     "--force-color-profile=srgb", f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(arguments, preexec_fn=place, pass_fds=(3, 4), stdin=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in ends:
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._session = None
        self.events = []  # all that were seen: (method, parameters)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._to)
        self._process.kill()
        self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def _message(self, deadline):
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError(f"the browser did not answer within {PATIENCE} s")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._message(deadline)
            if message.get("id") == self._last_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            if "method" in message:
                self.events.append((message["method"], message["params"]))

    def open(self, path, width, height, dark=False, mobile=False):
        """Loads a file into a window of that size and lets it draw."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1,
                  mobile=mobile)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + PATIENCE
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            message = self._message(deadline)
            self.events.append((message.get("method"), message.get("params")))
        self.settle()

    def settle(self):
        """Until observers of sizes have been called and what they drew is laid out."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def click(self, x, y):
        """In pixels of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1)
        self.settle()

    def problems(self):
        """What the console had of errors, exceptions and things not loaded since `open`."""
        found = []
        for method, parameters in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(parameters["exceptionDetails"]["exception"].get("description", "exception"))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(f"console.{parameters['type']}: {parameters['args']}")
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
        return found

    def requests(self):
        """Addresses that were asked for since `open`."""
        return [parameters["request"]["url"] for method, parameters in self.events if method == "Network.requestWillBeSent"]

    def screenshot(self, path):
        """The whole page as PNG, however high it is."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True,
                            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1})
        path.write_bytes(base64.b64decode(picture["data"]))
