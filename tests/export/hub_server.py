"""A small Hugging Face Hub: what huggingface_hub asks for an upload, in memory."""

from __future__ import annotations

import base64
import json
import re
import threading
from typing import Any
from urllib.parse import urlsplit

from tests.corpus.fetching.test_fetch import Handler, Server

TOKEN = "hf_write"
ATTRIBUTES = {".gitattributes": b"*.safetensors filter=lfs\n"}


class Repository:
    def __init__(self, files: dict[str, bytes], *, private: bool, title: str = "initial") -> None:
        self.files, self.private = files, private
        self.titles = [title]

    @property
    def head(self) -> str:
        return f"{len(self.titles):040x}"


class Hub(Server):
    """Knows the user `me`, who belongs to `team`; `faults` by path, as the server of corpora."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = HubHandler
        self.role = "write"
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.during_upload = threading.Event()
        self.before_commit: Any = lambda: None

    def asked_paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.requests]


class HubHandler(Handler):
    server: Hub

    def do_GET(self) -> None:  # noqa: N802
        hub, path = self.server, urlsplit(self.path).path  # of a proxied request: a whole address
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path, dict(self.headers)))
        fault = hub.faults[path].pop(0) if hub.faults.get(path) else ""
        if fault == "drop":
            self.close_connection = True
        elif fault == "stall":
            hub.during_upload.set()
            self.rfile.read(1)  # until the client is gone
            self.close_connection = True
        elif fault:
            self.say(int(fault), {"error": "as the test wants"})
        elif path.startswith("/storage/"):
            hub.blobs[path.removeprefix("/storage/")] = body
            self.say(200, {})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.say(401, {"error": "Invalid username or password."})
        else:
            self.say(*self.answer_api(path, body))

    do_POST = do_PUT = do_GET  # noqa: N815

    def say(self, status: int, content: object, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer_api(self, path: str, body: bytes) -> tuple[int, object]:
        hub = self.server
        if path == "/api/whoami-v2":
            token = {"displayName": "test", "role": hub.role}
            return 200, {"name": "me", "orgs": [{"name": "team"}], "auth": {"accessToken": token}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repositories:
                return 409, {"error": "You already created this model repo"}
            private = asked["visibility"] == "private"
            hub.repositories[name] = Repository(dict(ATTRIBUTES), private=private)
            return 200, {"url": f"http://{self.headers['Host']}/{name}", "name": name}
        match = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/.]+)(?:\.git)?(/.*)?", path)
        repository = hub.repositories.get(match[1]) if match else None
        if match is None or repository is None:
            return 404, {"error": "Repository not found"}
        return self.answer_repository(match[1], repository, (match[2] or "").split("/"), body)

    def answer_repository(
        self, name: str, repository: Repository, words: list[str], body: bytes
    ) -> tuple[int, object]:
        verb = words[1] if len(words) > 1 else ""
        if verb == "auth-check":
            return 200, {}
        if verb == "commits":
            titles = reversed(repository.titles)
            date, authors = "2026-01-01T00:00:00.000Z", [{"user": "me"}]
            return 200, [
                {"id": "0" * 40, "authors": authors, "date": date, "title": title, "message": ""}
                for title in titles
            ]
        if verb == "preupload":
            files = json.loads(body)["files"]
            return 200, {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith("tensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
            }
        if verb == "info":
            objects = json.loads(body)["objects"]
            place = f"{self.server.address}/storage/"
            for each in objects:
                each["actions"] = {"upload": {"href": place + each["oid"]}}
            return 200, {"transfer": "basic", "objects": objects}
        if verb == "commit":
            self.server.before_commit()
            return self.commit(name, repository, body)
        files = [{"rfilename": path} for path in repository.files]
        known = {"private": repository.private, "siblings": files, "sha": repository.head}
        return 200, {"id": name, **known}

    def commit(self, name: str, repository: Repository, body: bytes) -> tuple[int, object]:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit", repository.head) != repository.head:
            return 412, {"error": "A commit has happened since"}
        for each in operations:
            value, path = each["value"], each["value"]["path"]
            if each["key"] == "deletedFile":
                del repository.files[path]
            elif each["key"] == "lfsFile":
                repository.files[path] = self.server.blobs[value["oid"]]
            else:
                repository.files[path] = base64.b64decode(value["content"])
        repository.titles.append(header["value"]["summary"])
        address = f"http://{self.headers['Host']}/{name}/commit/{repository.head}"
        return 200, {"commitUrl": address, "commitOid": repository.head, "success": True}
