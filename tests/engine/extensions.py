"""What a user may load into vLLM: a custom logits processor and a reasoning parser."""

import torch
from vllm.reasoning.abs_reasoning_parsers import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

CUSTOM_PROCESSOR = f"{__name__}:EchoTwoBack"
REASONING_PARSER, SCANNING_PARSER = "signature", "signature_by_scan"
END_OF_THINKING = 280  # the token "):"; what follows is bound to the request's grammar


class EchoTwoBack(LogitsProcessor):
    """Favours the token before the last one, which lies in the row before, or in the text before the first row.

    A request may decline it.
    """

    def __init__(self, vllm_config, req_states) -> None:
        self.req_states = req_states
        self.takes = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.takes[req_idx] = not (sampling_params.extra_args or {}).get("no_echo")
        return bool(self.takes[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.long()
        committed = self.req_states.all_token_ids.gpu[slots, self.req_states.total_len.gpu[slots].long() - 2]
        two_back = ctx.input_ids.roll(1).where(ctx.expanded_local_pos > 0, committed)
        return logits.scatter_add(1, two_back.long()[:, None], self.takes[slots, None] * 9.0)


@ReasoningParserManager.register_module(REASONING_PARSER)
class SignatureIsThinking(BaseThinkingReasoningParser):
    """A function's signature is the thinking: what the tiny target writes between "def" and "):"."""

    start_token = "def"
    end_token = "):"

    def extract_reasoning(self, model_output: str, request) -> tuple[str | None, str | None]:
        raise AssertionError("only the server asks for it")


@ReasoningParserManager.register_module(SCANNING_PARSER)
class SignatureByScan(SignatureIsThinking):
    """The same, by the whole text and not by the newest tokens, as vLLM's parsers do unless they say otherwise."""

    def is_reasoning_end_streaming(self, input_ids, delta_ids) -> bool:
        return self.is_reasoning_end(input_ids)
