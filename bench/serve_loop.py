"""The client of `bench.serve`, in a subprocess: a loop shaped like the cookbook's, timed from outside.

Times are the client's, from a call to its result. Through a pipe the client asks the server's process for its
peak memory, and sends it the measured rows.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bench.result import Row
from bench.served import BASE
from qerl.errors import QeRLError

Memory = Callable[[], dict[str, float]]
"""Returns the peak of the server's memory since the last call."""


class Loop:
    """A client's loop over several models of one server.

    Args:
        url: The server's URL.
        args: Options of the benchmark.
        vocabulary: Size of the model's vocabulary.
        memory: Returns the server's peak memory since the last call.
        base: The server's name for the base model.
    """

    def __init__(
        self, url: str, args: argparse.Namespace, vocabulary: int, memory: Memory, base: str = BASE
    ) -> None:
        import tinker

        self._tinker, self._args, self._vocabulary, self._memory = tinker, args, vocabulary, memory
        self._base = base
        self._draw = random.Random(0)
        self._service = tinker.ServiceClient(base_url=url)
        self._newest: list[Any] = []  # data of the newest step
        self.models: list[Any] = []

    def grow(self, count: int) -> None:
        """Create models until there are ``count``."""
        while len(self.models) < count:
            made = self._service.create_lora_training_client(base_model=self._base, rank=self._args.rank)
            self.models.append(result_of(made))

    def sample(self, model: Any) -> list[Any]:
        """Return a batch of samples from the model's current weights, as data for its update."""
        sampler = result_of(model.save_weights_and_get_sampling_client())
        asked = [
            (prompt, sampler.sample(inputs, 1, self._params()))
            for prompt, inputs in self._prompts()
            for _ in range(self._args.samples)
        ]
        return [self._datum(prompt, result_of(future).sequences[0]) for prompt, future in asked]

    def _params(self) -> Any:
        return self._tinker.types.SamplingParams(max_tokens=self._args.tokens, temperature=1.0, stop=[])

    def _prompts(self) -> Iterator[tuple[list[int], Any]]:
        """Yield the prompts of a step, as token ids and as the client sends them."""
        for _ in range(self._args.prompts):
            prompt = [self._draw.randrange(1, self._vocabulary) for _ in range(self._args.prompt)]
            yield prompt, self._tinker.types.ModelInput.from_ints(prompt)

    def _datum(self, prompt: list[int], drawn: Any) -> Any:
        """Return a sample as the cookbook sends it: prompt and completion; only the completion is trained."""
        types = self._tinker.types
        if len(drawn.tokens) != self._args.tokens:
            raise QeRLError(f"A sample has {len(drawn.tokens)} tokens instead of {self._args.tokens}.")
        whole, before = [*prompt, *drawn.tokens], len(prompt) - 1
        advantage = self._draw.gauss(0.0, 1.0)
        inputs = {
            "target_tokens": whole[1:],
            "logprobs": [0.0] * before + list(drawn.logprobs),
            "advantages": [0.0] * before + [advantage] * len(drawn.tokens),
        }
        return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)

    def update(self, model: Any, data: Sequence[Any]) -> dict[str, float]:
        """Run an optimizer step with some data and return its metrics."""
        passed = model.forward_backward(data, "importance_sampling")
        stepped = model.optim_step(self._tinker.types.AdamParams(learning_rate=1e-5))
        passed.result()
        return {"grad_norm": stepped.result().metrics["grad_norm"]}

    def timed_step(self) -> Row:
        """Run a step of the first model and return its seconds and memory."""
        self._memory()
        start = time.perf_counter()
        self._newest = self.sample(self.models[0])
        middle = time.perf_counter()
        metrics = self.update(self.models[0], self._newest)
        end = time.perf_counter()
        tokens = self._args.tokens * len(self._newest)
        return {
            "sample_s": middle - start, "update_s": end - middle, "total_s": end - start, "tokens": tokens,
            "tokens_per_s": tokens / (end - start), **metrics, **self._memory(),
        }  # fmt: skip

    def fill(self) -> dict[str, float]:
        """Return the peak memory while the first model is updated and all others hold moments and gradients.

        The update uses the data of the last timed step.
        """
        few = self._newest[: self._args.samples]
        for model in self.models[1:]:
            self.update(model, few)
        for model in self.models[1:]:
            model.forward_backward(few, "importance_sampling").result()
        self._memory()
        self.update(self.models[0], self._newest)
        found = self._memory()
        adam = self._tinker.types.AdamParams(learning_rate=1e-5)
        for model in self.models[1:]:
            model.optim_step(adam).result()
        return found


def result_of(future: Any) -> Any:
    """Return a call's result, which may be nested in futures; older clients return some results directly."""
    while hasattr(future, "result"):
        future = future.result()
    return future


def client(
    url: str, args: argparse.Namespace, vocabulary: int, server: "Connection[Any, dict[str, float]]"
) -> None:
    """Run the client's process: it sends a row per number of adapters, and None to ask for peak memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CUDA context here would count as the server's memory

    def memory() -> dict[str, float]:
        server.send(None)
        return server.recv()

    loop = Loop(url, args, vocabulary, memory)
    for count in sorted(args.adapters):
        loop.grow(count)
        if count == min(args.adapters) and args.steps > 1:
            loop.timed_step()  # captures and compiles
        steps = [loop.timed_step() for _ in range(args.steps)]
        row = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        peaks = {key: max(peak, *(step[key] for step in steps)) for key, peak in loop.fill().items()}
        server.send({"adapters": count, **row, **peaks, "steps": steps})
