"""Routes that list, delete and download saved weights, and set when they expire.

A download is a link, signed with the server's key and valid for an hour, that any HTTP client can fetch: a
whole checkpoint as one tar file, or one of its files.
"""

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from qerl.errors import QeRLError
from qerl_serve import owners
from qerl_serve.clients import Clients
from qerl_serve.names import SCHEME, split_path
from qerl_serve.requests import Ttl, read
from qerl_serve.types import Backend, Checkpoint, NotSavedError, WeightsInfo

VALID_S = 3600
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_RUN = "/api/v1/training_runs/{run}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"


class CheckpointRoutes:
    """Routes about saved weights.

    Args:
        clients: Records of clients, and the queue to the backend.
        secret: The key that signs links.
    """

    def __init__(self, clients: Clients, secret: str) -> None:
        self._clients, self._secret = clients, secret.encode()

    def routes(self) -> list[BaseRoute]:
        """Return the routes for the application."""
        return [
            Route("/api/v1/checkpoints", self._all, methods=["GET"]),
            Route("/api/v1/training_runs", self._runs, methods=["GET"]),
            Route(_RUN, self._run, methods=["GET"]),
            Route(_RUN + "/checkpoints", self._of_run, methods=["GET"]),
            Route(_CHECKPOINT, self._delete, methods=["DELETE"]),
            Route(_CHECKPOINT + "/ttl", self._ttl, methods=["PUT"]),
            Route(_CHECKPOINT + "/archive", self._archive, methods=["GET"]),
            Route(_CHECKPOINT + "/external_weights_urls", self._files, methods=["GET"]),
            Route("/api/v1/download/{run}/{kind}/{name}/{file}", self._download, methods=["GET"]),
        ]

    async def _call(self, run: Callable[[Backend], Any]) -> Any:
        try:
            return await asyncio.wrap_future(self._clients.queue.call(run))
        except NotSavedError as error:
            raise HTTPException(404, str(error)) from error

    async def _saved(self) -> list[Checkpoint]:
        """All checkpoints, newest first."""
        return [*reversed(await self._call(methodcaller("checkpoints")))]

    async def _checkpoint(self, request: Request) -> Checkpoint:
        found: Checkpoint = await self._call(methodcaller("checkpoint", _path(request)))
        return found

    async def _all(self, request: Request) -> Response:
        saved, cursor = _page(request, await self._saved())
        return JSONResponse({"checkpoints": [*map(_described, saved)], "cursor": cursor})

    async def _of_run(self, request: Request) -> Response:
        run = request.path_params["run"]
        saved = [item for item in await self._saved() if split_path(item.path)[0] == run]
        return JSONResponse({"checkpoints": [*map(_described, saved)]})

    async def _runs(self, request: Request) -> Response:
        described = await self._described_runs()
        runs, cursor = _page(request, list(described.values()))
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def _run(self, request: Request) -> Response:
        run = (await self._described_runs()).get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, f"This server has no training run {request.path_params['run']}.")
        return JSONResponse(run)

    async def _described_runs(self) -> dict[str, dict[str, Any]]:
        """Live models and models with saved weights, by id; the live ones first."""
        saved = await self._saved()
        runs = {}
        for model_id in list(self._clients.models):
            model = self._clients.model(model_id)
            if model is not None and model.info is not None:
                mine = [item for item in saved if split_path(item.path)[0] == model.id]
                owner = self._clients.owner_of(model.id)
                runs[model.id] = _described_run(model.id, owner, model.info, model.used, mine, model.notes)
        for checkpoint in saved:
            run = split_path(checkpoint.path)[0]
            if run not in runs:
                try:
                    info = await self._call(methodcaller("weights_info", checkpoint.path))
                except (HTTPException, QeRLError):  # it was deleted since it was listed, or is damaged
                    continue
                mine = [item for item in saved if split_path(item.path)[0] == run]
                notes = checkpoint.notes
                runs[run] = _described_run(run, notes.owner, info, checkpoint.time, mine, notes.run)
        return runs

    async def _check_owner(self, request: Request) -> None:
        """Raise if saved weights, damaged or not, belong to another owner; they are the server's own if their
        owner is not legible.

        Raises:
            HTTPException: 403 if they belong to another owner, 404 if nothing is saved there.
        """
        path = _path(request)
        try:
            found = [await self._checkpoint(request)]
        except QeRLError:  # it is damaged, but still listed
            found = [saved for saved in await self._saved() if saved.path == path]
        for saved in found:
            if not owners.now().may(saved.notes.owner):
                whose = saved.notes.owner or "the server"
                raise HTTPException(403, f"{path} belongs to {whose}; only its owner may change it.")

    async def _delete(self, request: Request) -> Response:
        await self._check_owner(request)
        await self._call(methodcaller("delete_checkpoint", _path(request)))
        return Response(status_code=204)

    async def _ttl(self, request: Request) -> Response:
        await self._check_owner(request)
        expires = read(Ttl, await request.body()).expires()
        await self._call(methodcaller("expire_checkpoint", _path(request), expires))
        return Response(status_code=204)

    async def _archive(self, request: Request) -> Response:
        checkpoint = await self._checkpoint(request)
        expires = int(time.time()) + VALID_S
        url = self._link(request, checkpoint, f"{request.path_params['name']}.tar", expires)
        return JSONResponse({"url": url, "expires": _date(expires)})

    async def _files(self, request: Request) -> Response:
        checkpoint = await self._checkpoint(request)
        expires = int(time.time()) + VALID_S
        urls = {
            file.name: self._link(request, checkpoint, file.name, expires) for file in _files_of(checkpoint)
        }
        return JSONResponse({"urls": urls, "expires": _date(expires)})

    async def _download(self, request: Request) -> Response:
        file, query = request.path_params["file"], request.query_params
        expires = query.get("expires", "")
        signature = self._signature(request.url.path, expires)
        if not hmac.compare_digest(query.get("signature", "").encode(), signature.encode()):
            raise HTTPException(403, "This link is not signed by this server.")
        if int(expires) < time.time():
            raise HTTPException(403, "This link has expired; ask for a new one.")
        checkpoint = await self._checkpoint(request)
        paths = _files_of(checkpoint)
        if file == f"{request.path_params['name']}.tar":
            return StreamingResponse(_tar(_opened(paths, checkpoint)), media_type="application/x-tar")
        for path in paths:
            if path.name == file:
                return FileResponse(path)
        raise HTTPException(404, f"{checkpoint.path} has no file {file}.")

    def _link(self, request: Request, checkpoint: Checkpoint, file: str, expires: int) -> str:
        path = f"/api/v1/download/{checkpoint.path.removeprefix(SCHEME)}/{file}"
        return str(
            request.url.replace(
                path=path, query=f"expires={expires}&signature={self._signature(path, str(expires))}"
            )
        )

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path}?{expires}".encode(), hashlib.sha256).hexdigest()


def _path(request: Request) -> str:
    """Return the tinker:// path that a route names.

    Raises:
        QeRLError: The route does not name a valid path.
    """
    parts = request.path_params
    path = f"{SCHEME}{parts['run']}/{parts['kind']}/{parts['name']}"
    split_path(path)
    return path


def _page(request: Request, items: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """Return the items selected by `offset` and `limit`, and their position among all."""
    asked = [request.query_params.get(name, "") for name in ("offset", "limit")]
    offset, limit = (
        int(text) if re.fullmatch("[0-9]{1,18}", text) else default
        for text, default in zip(asked, (0, 100), strict=True)
    )
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    _, kind, name = split_path(checkpoint.path)
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": _TYPES[kind],
        "time": _date(checkpoint.time),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "user_metadata": dict(checkpoint.notes.own),
        "expires_at": None if checkpoint.notes.expires is None else _date(checkpoint.notes.expires),
    }


def _described_run(
    run: str,
    owner: str,
    info: WeightsInfo,
    used: float,
    saved: Sequence[Checkpoint],
    notes: Mapping[str, str],
) -> dict[str, Any]:
    last = {split_path(item.path)[1]: _described(item) for item in reversed(saved)}
    return {
        "training_run_id": run,
        "base_model": info.base_model,
        "model_owner": owner or owners.LOCAL,
        "is_lora": True,
        "lora_rank": info.lora_rank,
        "last_request_time": _date(used),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": dict(notes),
    }


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _files_of(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of a checkpoint that clients may download.

    Raises:
        HTTPException: 404 if the checkpoint was deleted after it was described.
    """
    try:
        found = [
            path
            for path in checkpoint.folder.iterdir()
            if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
        ]
    except FileNotFoundError:
        raise _deleted(checkpoint) from None
    return sorted(found)


def _opened(paths: Sequence[Path], checkpoint: Checkpoint) -> list[BinaryIO]:
    """Open the files of a checkpoint, so that they can be read to the end even if it is deleted meanwhile.

    Raises:
        HTTPException: 404 if the checkpoint was deleted after its files were listed.
    """
    with contextlib.ExitStack() as stack:
        try:
            files: list[BinaryIO] = [stack.enter_context(path.open("rb")) for path in paths]
        except FileNotFoundError:
            raise _deleted(checkpoint) from None
        stack.pop_all()
    return files


def _deleted(checkpoint: Checkpoint) -> HTTPException:
    return HTTPException(404, f"{checkpoint.path} was deleted.")


def _tar(files: Sequence[BinaryIO]) -> Iterator[bytes]:
    """Yield a tar file with these files at its top level, in pieces; closes the files."""
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        for file in files:
            entry = tarfile.TarInfo(Path(file.name).name)
            entry.size = os.fstat(file.fileno()).st_size
            yield entry.tobuf()
            while piece := file.read(1 << 20):
                yield piece
            yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
