"""The client of `bench.serve`, in a process of its own: a loop of the cookbook's shape, timed from outside.

Times are a client's: from a call to its result. The server's process is asked through a pipe for the peak of
its memory, and told through the same pipe what was measured.
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
"""The peak of the server's memory since it was last asked for."""


class Loop:
    """A client's loop over several models of one server.

    Args:
        url: Of the server.
        args: Options of the benchmark.
        vocabulary: Tokens of the model.
        memory: Asks the server's process.
        base: The base model, by the server's name for it.
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
        """Create models until there are so many."""
        while len(self.models) < count:
            made = self._service.create_lora_training_client(base_model=self._base, rank=self._args.rank)
            self.models.append(result_of(made))

    def sample(self, model: Any) -> list[Any]:
        """A batch of samples of a model as it is now, as data for its update."""
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
        """Prompts of a step, as token ids and as the client sends them."""
        for _ in range(self._args.prompts):
            prompt = [self._draw.randrange(1, self._vocabulary) for _ in range(self._args.prompt)]
            yield prompt, self._tinker.types.ModelInput.from_ints(prompt)

    def _datum(self, prompt: list[int], drawn: Any) -> Any:
        """A sample as the cookbook sends it: prompt and completion, of which the latter counts."""
        types = self._tinker.types
        if len(drawn.tokens) != self._args.tokens:
            raise QeRLError(f"A sample has {len(drawn.tokens)} tokens of {self._args.tokens}.")
        whole, before = [*prompt, *drawn.tokens], len(prompt) - 1
        advantage = self._draw.gauss(0.0, 1.0)
        inputs = {
            "target_tokens": whole[1:],
            "logprobs": [0.0] * before + list(drawn.logprobs),
            "advantages": [0.0] * before + [advantage] * len(drawn.tokens),
        }
        return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)

    def update(self, model: Any, data: Sequence[Any]) -> dict[str, float]:
        """A step of the optimizer with some data; what it says."""
        passed = model.forward_backward(data, "importance_sampling")
        stepped = model.optim_step(self._tinker.types.AdamParams(learning_rate=1e-5))
        passed.result()
        return {"grad_norm": stepped.result().metrics["grad_norm"]}

    def timed_step(self) -> Row:
        """Seconds and memory of a step of the first model."""
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
        """Peak of memory while all models have moments and gradients and the first is updated, with the data
        of the step before."""
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
    """What a call gives; some give a future of a future, and older clients what they make at once."""
    while hasattr(future, "result"):
        future = future.result()
    return future


def client(
    url: str, args: argparse.Namespace, vocabulary: int, server: "Connection[Any, dict[str, float]]"
) -> None:
    """The client's process: sends what it measured with each number of adapters, and None to ask for the
    peak of memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # whose context would count as the server's memory

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
