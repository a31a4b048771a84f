"""The state of a running server, for the terminal."""

import json
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qerl.errors import QeRLError
from qerl.visible import visible


def print_status(url: str, api_key: str, console: Console) -> None:
    """Print a server's clients, their models, and its pending requests.

    Args:
        url: URL of the server.
        api_key: Its key.
        console: Where to print.

    Raises:
        QeRLError: The server does not answer, or the key is another server's.
    """
    request = urllib.request.Request(f"{url}/status", headers={"X-API-Key": api_key})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status = json.load(answer)
    except urllib.error.HTTPError as error:
        raise QeRLError(
            f"{url} refused the request ({error.code}); give its --api_key or --output_dir."
        ) from error
    except (OSError, ValueError) as error:
        raise QeRLError(f"No `qerl serve` answers at {url} ({error}); give its --host and --port.") from error
    console.print(f"{status['bases'][0]}, since {status['seconds'] // 60} min", markup=False, highlight=False)
    console.print(_table(status) if status["sessions"] else "No client is connected.")
    waiting = [f"{number} {kind}" for kind, number in status["waiting"].items() if number]
    console.print(f"Waiting: {', '.join(waiting) or 'nothing'}.")
    if "update_every_n_layers" in status["gauges"]:  # once the worker has had something to do
        console.print(_updates(status["gauges"]), highlight=False)


def _updates(gauges: dict[str, float]) -> str:
    """Describe how updates are computed at present; running out of memory changes it permanently."""
    tokens, every = gauges.get("update_tokens_per_forward"), int(gauges["update_every_n_layers"])
    most = "as many tokens as there are" if tokens is None else f"at most {tokens:.0f} tokens"
    again = {0: "no layer", 1: "every layer"}.get(every, f"one layer of {every}")
    return f"Updates: {most} at a time, {again} recomputed for the backward pass."


def _table(status: dict[str, Any]) -> Table:
    table = Table("session", "owner", "client", "heard of", "model", "rank", "steps", "samplers", box=None)
    for session in status["sessions"]:
        who = (
            session["id"][:8],
            session["owner"],
            session["sdk_version"],
            f"{session['silent_seconds']} s ago",
        )
        models = [
            (model["id"].partition(":")[2], str(model["rank"]), str(model["steps"]))
            for model in session["models"]
        ]
        for row, model in enumerate(models or [("none", "", "")]):
            cells = (*(("", "", "", "") if row else who), *model, "" if row else str(session["samplers"]))
            table.add_row(*(Text(visible(cell)) for cell in cells))  # some cells hold text from clients
    return table
