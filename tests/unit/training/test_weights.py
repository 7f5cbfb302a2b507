"""New weights reach every server that answers, are seen in its log-probs, and leave nothing behind."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from deepswe.config import VllmConfig
from deepswe.errors import ConfigError, PolicyError
from deepswe.policy.vllm import VllmPolicy
from deepswe.session.serve import server_arguments, server_environment
from deepswe.training.weights import FileTransfer, VllmWeights, mismatch
from deepswe.training.weights_file import safetensors_writer, scorer, tied_names, with_copies
from deepswe.training.weights_native import NativeTransfer
from tests.unit.policy.test_vllm import serving
from tests.unit.simulate.killing import recipe
from tests.vllm_server.contract import PROMPT, greedy
from tests.vllm_server.real import make_model, save_untied
from tests.vllm_server.server import FakeVllm


def test_weights_are_written_loaded_compared_and_removed(tmp_path: Path) -> None:
    async def run() -> None:
        fakes = [FakeVllm(), FakeVllm()]
        values = {"w": torch.tensor([1.0])}
        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(serving(fake)) for fake in fakes]
            policy = await stack.enter_async_context(VllmPolicy(VllmConfig(servers=tuple(addresses))))
            transfer = FileTransfer(safetensors_writer(values.items), tmp_path, timeout_s=5.0)

            def score(tokens: object) -> list[float]:  # the learner has what the first server was given
                return [fakes[0].toy.logprobs(PROMPT[:n], 1.0)[PROMPT[n]] for n in range(1, len(PROMPT))]

            weights = await stack.enter_async_context(VllmWeights(policy, transfer, score))
            await policy.generate("a", PROMPT, greedy(2), timeout_s=5)
            before = await policy.servers[0].score(PROMPT)
            row = await weights.publish(3)
            assert row["servers"] == 2
            assert row["mismatch_max"] < 1e-6
            assert await policy.servers[1].score(PROMPT) != before
            assert (await policy.generate("a", PROMPT, greedy(2), timeout_s=5)).version == 3
            assert [fake.calls for fake in fakes] == [["reload_weights", "/reset_prefix_cache"]] * 2
            fakes[1].toy.weights, fakes[1].toy.table = b"other", {}
            with pytest.raises(PolicyError, match="differ by"):
                await weights._compare(policy.servers)

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_an_untied_model_is_served_and_updated_as_the_tied_one_that_learns(tmp_path: Path) -> None:
    learner = make_model()
    save_untied(learner, tmp_path / "served")
    served = Qwen3ForCausalLM.from_pretrained(tmp_path / "served")
    assert served.lm_head.weight is not served.model.embed_tokens.weight
    with torch.no_grad():
        learner.model.embed_tokens.weight.add_(1.0)
    (tmp_path / "new").mkdir()
    safetensors_writer(with_copies(learner.named_parameters, tied_names(learner)))(tmp_path / "new")
    served.load_state_dict(load_file(next((tmp_path / "new").iterdir())), strict=True)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(served(ids).logits, learner(ids).logits)
    assert tied_names(served) == {}


def test_a_server_that_cannot_load_is_left_out_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    class Full(FakeVllm):
        async def collective_rpc(self, request):
            raise OSError("no memory")

    async def run(*fakes: FakeVllm) -> float:
        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(serving(fake)) for fake in fakes]
            policy = await stack.enter_async_context(VllmPolicy(VllmConfig(servers=tuple(addresses))))
            transfer = FileTransfer(lambda path: None, tmp_path, timeout_s=5.0)
            weights = await stack.enter_async_context(VllmWeights(policy, transfer))
            return (await weights.publish(1))["servers"]

    assert asyncio.run(run(FakeVllm(), Full())) == 1
    with pytest.raises(PolicyError, match="none of 1 vLLM servers took"):
        asyncio.run(run(Full()))


def test_the_scorer_gives_the_log_probs_of_the_model(make_model) -> None:
    model = make_model(torch.float32)
    tokens = [3, 9, 4, 1]
    logp_TV = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    wanted = [float(logp_TV[place, token].detach()) for place, token in enumerate(tokens[1:])]
    assert mismatch(scorer(model, bfloat16=False)(tokens), wanted).most < 1e-5


def test_gpu_transfer_is_refused_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="use file"):
        NativeTransfer({}.items, "nccl", timeout_s=1.0)


def test_a_served_model_gives_log_probs_at_its_temperature_and_takes_weights() -> None:
    command = server_arguments(recipe(), "/model", host="127.0.0.1", port=8001)
    assert command[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert {"processed_logprobs", "36864", "8001"} <= set(command)
    environment = server_environment(1, 2, "file")
    assert (environment["VLLM_SERVER_DEV_MODE"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "2,3")
