"""``speculative_config`` as a user writes it: what it becomes, and one clear error for everything that cannot work.

No engine is started here: vLLM makes its whole config, with this method's checks, before it takes any memory.
"""

import json
import logging
import os
import sys

import pytest

from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, TARGET
from vllm_dartree.emulation import activate

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
activate()


@pytest.fixture(autouse=True)
def _environment_is_read_afresh():
    """An engine that ran in this process before has made vLLM keep its environment variables."""
    from vllm import envs

    envs.disable_envs_cache()


def engine_args(speculative=None, model=str(TARGET), **settings):
    from vllm.engine.arg_utils import EngineArgs

    keys = {"method": "dartree", "model": str(DOMINO)} | (speculative or {})
    keys = {key: value for key, value in keys.items() if value != "absent"}
    defaults = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True}
    return EngineArgs(model=model, speculative_config=keys, **defaults | settings)


def refusal(speculative=None, **settings) -> str:
    """The message of the error at start, which must be one of ours, raised in this process."""
    from vllm_dartree.features import DartreeConfigError
    from vllm_dartree.heads import DrafterConfigError

    args = engine_args(speculative, **settings)
    with pytest.raises((DartreeConfigError, DrafterConfigError)) as error:
        args.create_engine_config()
    return str(error.value)


@pytest.fixture
def changed(tmp_path):
    """A folder with the config of a bundled checkpoint, changed."""

    def make(folder, **changes):
        place = tmp_path / folder.name
        place.mkdir(exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        nested = changes.pop("dflash_config", {})
        config = {key: value for key, value in (config | changes).items() if value != "absent"}
        if nested:
            config["dflash_config"] = {
                key: value for key, value in (config["dflash_config"] | nested).items() if value != "absent"
            }
        (place / "config.json").write_text(json.dumps(config))
        return str(place)

    return make


# --- What the keys become --------------------------------------------------------------------------------------------


def test_defaults():
    from vllm_dartree.tree import TreeConfig

    config = engine_args().create_engine_config()
    speculative = config.speculative_config
    assert speculative.tree == TreeConfig(64, 12, 64, -0.2, "pruned", None)
    assert (speculative.method, speculative.num_speculative_tokens) == ("dflash", 64)
    assert (speculative.drafter.head, speculative.drafter.num_slots) == ("domino", 15)
    assert speculative.draft_model_config.architecture == "DartreeDFlash"
    assert config.parallel_config.worker_cls == "vllm_dartree.engine.cpu_worker.DartreeCPUWorker"


def test_it_prints_itself_in_one_line():
    shown = repr(engine_args().create_engine_config().speculative_config)
    assert "budget=64" in shown
    assert len(shown) < 600


def test_all_keys():
    from vllm_dartree.tree import TreeConfig

    keys = {
        "num_speculative_tokens": 24,
        "tree_width": 5,
        "tree_candidates": 16,
        "tree_depth": 7,
        "tree_depth_bonus": 0,
        "tree_variant": "pruned",
    }
    speculative = engine_args(keys).create_engine_config().speculative_config
    assert speculative.tree == TreeConfig(24, 5, 16, 0, "pruned", 7)
    assert speculative.num_speculative_tokens == 24


def test_a_budget_by_load():
    speculative = engine_args({"num_speculative_tokens": 16, "tree_budget": "auto"}).create_engine_config()
    speculative = speculative.speculative_config
    assert speculative.auto_budget
    assert speculative.num_speculative_tokens_per_batch_size == [(1, 1, 16), (2, 2, 4), (3, 3, 0)]
    assert not engine_args({"tree_budget": "fixed"}).create_engine_config().speculative_config.auto_budget
    message = refusal({"tree_budget": "large"})
    assert "tree_budget is 'large'; it must be one of 'fixed', 'auto'" in message
    message = refusal({"tree_budget": "auto", "num_speculative_tokens_per_batch_size": [(1, 8, 16)]})
    assert "num_speculative_tokens_per_batch_size is given too" in message
    message = refusal({"tree_budget": "auto"}, data_parallel_size=2)
    assert "data_parallel_size is 2" in message


def test_a_scheduler_without_room_for_a_tree_is_told(caplog, monkeypatch):
    args = engine_args({"num_speculative_tokens": 16}, max_num_batched_tokens=31, max_num_seqs=1)
    engine_args().create_engine_config()  # the first one in a process sets vLLM's loggers up
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    args.create_engine_config()
    assert "max_num_batched_tokens is 31, but a request with a whole tree takes 32 of them (its 17 rows" in caplog.text


JSON_FORM = ["--speculative-config", json.dumps({"method": "dartree", "model": str(DOMINO), "tree_width": 7})]
DOTTED_FORM = [
    "--speculative-config.method",
    "dartree",
    f"--speculative-config.model={DOMINO}",
    "--speculative-config.tree-width",
    "7",
]
ALIASES = ["--spec-model", str(DOMINO), "--speculative-config.method=dartree", "--speculative-config.tree_width=7"]


@pytest.mark.parametrize("words", [JSON_FORM, DOTTED_FORM, ALIASES], ids=["json", "dotted", "aliases"])
def test_forms_of_the_command_line(words):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", str(TARGET), "--max-model-len", "512", *words]))
    assert args.create_engine_config().speculative_config.tree.width == 7


def test_the_aliases_alone_are_enough_offline():
    keys = {"method": "absent", "model": "absent"}
    args = engine_args(keys, spec_method="dartree", spec_model=str(DOMINO), spec_tokens=9)
    assert args.create_engine_config().speculative_config.tree.budget == 9


def test_the_arguments_stay_as_they_were_and_work_twice():
    keys = {"method": "dartree", "model": str(DOMINO), "tree_width": 3, "num_speculative_tokens": 9}
    args = engine_args(keys)
    first = args.create_engine_config().speculative_config
    assert args.speculative_config == keys
    second = args.create_engine_config().speculative_config
    assert type(first) is type(second)
    assert (first.tree, first.drafter) == (second.tree, second.drafter)


def test_a_default_budget_shrinks_to_the_nodes_there_can_be():
    assert engine_args({"tree_variant": "chain"}).create_engine_config().num_speculative_tokens == 15
    keys = {"tree_width": 2, "tree_depth": 4}
    assert engine_args(keys).create_engine_config().num_speculative_tokens == 8


def test_a_larger_budget_that_was_asked_for_shrinks_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    args = engine_args({"tree_variant": "chain", "num_speculative_tokens": 20})
    assert args.create_engine_config().num_speculative_tokens == 15
    assert "num_speculative_tokens is 20, but a tree has at most 15 nodes" in caplog.text


@pytest.mark.parametrize("budget", [1, 8, 64])
def test_cache_and_input_have_room_for_the_drafters_block_whatever_the_budget(budget):
    keys = {"num_speculative_tokens": budget}
    config = engine_args(keys, max_num_seqs=64, max_num_batched_tokens=512).create_engine_config()
    # 16 rows, the anchor's and 15 masks', behind what was verified.
    assert config.num_lookahead_tokens == 16
    # Input rows besides a request's own; newer versions of vLLM bound the number of requests instead.
    if config.speculative_config.max_num_new_slots_for_drafting:
        assert config.speculative_config.max_num_new_slots_for_drafting == 15
    else:
        assert config.scheduler_config.max_num_active_seqs == 512 // 16


def test_domino_checkpoints_under_their_own_architecture(changed):
    drafter = changed(DOMINO, architectures=["DominoDraftModel"])
    speculative = engine_args({"model": drafter}).create_engine_config().speculative_config
    assert speculative.draft_model_config.architecture == "DartreeDFlash"


def test_a_drafter_whose_anchor_predicts_has_one_slot_more(changed):
    drafter = changed(DOMINO, dflash_config={"projector_type": "absent", "sample_from_anchor": True})
    config = engine_args({"model": drafter}).create_engine_config()
    assert config.speculative_config.drafter.num_slots == 16
    assert config.num_lookahead_tokens == 16
    # vLLM's own speculator, which ours is built on, refuses to start with it.
    assert not config.speculative_config.draft_model_config.hf_config.dflash_config["sample_from_anchor"]


def test_a_drafter_with_fewer_positions_is_stretched_to_the_targets(changed):
    drafter = changed(DOMINO, max_position_embeddings=128)
    speculative = engine_args({"model": drafter}).create_engine_config().speculative_config
    assert speculative.draft_model_config.hf_config.max_position_embeddings == 512


# --- Kinds of drafters ------------------------------------------------------------------------------------------------

LILICORR = {"projector_type": "absent", "lilicorr_candidate_topk": 8}


@pytest.mark.parametrize(
    ("folder", "changes", "method", "head", "architecture", "candidates"),
    [
        (DSPARK, {}, "dspark", "markov", "Qwen3DSparkModel", 64),
        (DSPARK, {"architectures": ["DSparkDraftModel"]}, "dspark", "markov", "Qwen3DSparkModel", 64),
        (DSPARK, {"dspark_draft_topk": 5}, "dspark", "markov", "Qwen3DSparkModel", 5),
        (DFLASH2, {}, "dflash", "selector", "DartreeDFlash2", 16),
        (
            DOMINO,
            {"architectures": ["LiLiCorrDraftModel"], "dflash_config": LILICORR},
            "dflash",
            "lilicorr",
            "DartreeLiLiCorr",
            8,
        ),
    ],
)
def test_the_kind_is_found_from_the_checkpoint(changed, folder, changes, method, head, architecture, candidates):
    speculative = engine_args({"model": changed(folder, **changes)}).create_engine_config().speculative_config
    assert (speculative.method, speculative.drafter.head) == (method, head)
    assert speculative.draft_model_config.architecture == architecture
    assert (speculative.tree.candidates, speculative.tree.width) == (candidates, min(12, candidates))


def test_dspark_draft_topk_is_the_number_of_candidates():
    keys = {"model": str(DSPARK), "dspark_draft_topk": 20}
    assert engine_args(keys).create_engine_config().speculative_config.tree.candidates == 20
    fewer = engine_args(keys | {"tree_candidates": 15}).create_engine_config().speculative_config
    assert fewer.tree.candidates == fewer.draft_model_config.hf_config.dspark_draft_topk == 15


def test_a_checkpoint_in_the_format_of_speculators(changed):
    raw = json.loads((DSPARK / "config.json").read_text())
    drafter = changed(
        DSPARK,
        model_type="absent",
        architectures=["DSparkDraftModel"],
        speculators_model_type="dspark",
        speculators_config={},
        transformer_layer_config={key: raw[key] for key in raw if key not in ("dflash_config", "markov_rank")},
        aux_hidden_state_layer_ids=[2, 3, 4],
        mask_token_id=1,
    )
    speculative = engine_args({"model": drafter}).create_engine_config().speculative_config
    assert (speculative.drafter.head, speculative.drafter.num_slots) == ("markov", 15)
    assert speculative.drafter.target_layer_ids == (1, 2, 3)
    assert speculative.draft_model_config.architecture == "Qwen3DSparkModel"


@pytest.mark.parametrize("budget", [1, 40])
def test_dsparks_block_has_room_whatever_the_budget(changed, budget):
    drafter = changed(DSPARK, sample_from_anchor=True)
    config = engine_args({"model": drafter, "num_speculative_tokens": budget}).create_engine_config()
    assert config.num_lookahead_tokens == 16
    assert config.speculative_config.max_num_new_slots_for_drafting == 15


@pytest.mark.parametrize(
    ("folder", "keys", "words"),
    [
        (DFLASH2, {"tree_candidates": 17}, "tree_candidates is 17, but this drafter looks at the 16 best candidates"),
        (DFLASH2, {"tree_candidates": 8, "tree_width": 9}, "tree_width is 9 and tree_candidates is 8"),
        (DSPARK, {"tree_candidates": 9, "dspark_draft_topk": 8, "tree_width": 4}, "looks at the 8 best candidates"),
        (DSPARK, {"dspark_draft_topk": 5000}, "dspark_draft_topk is 5000, but the vocabulary has 1024 tokens"),
        (DSPARK, {"dspark_draft_topk": 0}, "dspark_draft_topk is 0, but it must be an integer >= 1"),
        (DOMINO, {"dspark_draft_topk": 8}, "dspark_draft_topk is 8, but it belongs to DSpark drafters and"),
    ],
)
def test_more_candidates_than_the_drafter_looks_at_are_refused(folder, keys, words):
    assert words in refusal({"model": str(folder)} | keys)


def test_more_candidates_than_a_reduced_vocabulary_has_are_refused(changed):
    assert "tree_candidates is 64, but the vocabulary has 40 tokens" in refusal(
        {"model": changed(DSPARK, draft_vocab_size=40)}
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen3XPressModel"]}, "does not drive: its refiner settles one block"),
        ({"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"}, "DeepSeek's DSpark is part of its"),
        ({"architectures": ["K3DSparkModel"]}, "it drafts with MLA"),
        ({"architectures": ["Gemma4DSparkModel"]}, "its targets are multimodal models"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, "a beam of its own"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            "has a markov head, which belongs to architectures Qwen3DSparkModel",
        ),
    ],
)
def test_drafters_that_cannot_be_driven_are_refused_with_the_reason(changed, changes, words):
    message = refusal({"model": changed(DSPARK, **changes)})
    assert words in message and changes["architectures"][0] in message


# --- Other methods ---------------------------------------------------------------------------------------------------


def test_dflash_is_untouched():
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig
    from vllm.exceptions import VLLMValidationError

    config = engine_args({"method": "dflash", "num_speculative_tokens": 7}).create_engine_config()
    speculative = config.speculative_config
    assert type(speculative) is SpeculativeConfig
    assert speculative.draft_model_config.architecture == "DFlashDraftModel"
    assert config.num_lookahead_tokens == 8
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        SamplingParams(min_p=0.1)._validate_spec_decode(speculative)


def test_no_speculation_is_untouched():
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(TARGET), max_model_len=512).create_engine_config()
    assert config.speculative_config is None
    assert config.num_lookahead_tokens == 0


def test_row_local_sampling_parameters_are_let_through():
    from vllm import SamplingParams

    config = engine_args().create_engine_config()
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, None)


# --- Keys that cannot work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tree_width": 0}, "tree_width is 0, but it must be an integer >= 1"),
        ({"tree_width": "12"}, "tree_width is '12', but it must be an integer >= 1"),
        ({"tree_candidates": 2.5}, "tree_candidates is 2.5, but it must be an integer >= 1"),
        ({"tree_depth": -1}, "tree_depth is -1, but it must be an integer >= 1"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, but it must be an integer >= 1"),
        ({"tree_depth_bonus": 0.5}, "tree_depth_bonus is 0.5, but it must be a finite number <= 0"),
        ({"tree_variant": "bushy"}, "tree_variant is 'bushy'; it must be one of pruned, fixed, chain"),
        (
            {"tree_width": 20, "tree_candidates": 10},
            "tree_width is 20 and tree_candidates is 10, but the anchor has only as many children as there are "
            "candidates; lower tree_width or raise tree_candidates",
        ),
        ({"tree_depth": 16}, "tree_depth is 16, but the drafter's block has 15 slots after the anchor"),
        (
            {"tree_variant": "fixed", "num_speculative_tokens": 300, "tree_candidates": 8},
            "num_speculative_tokens is 300 over 15 depths, so the fixed variant grows 20 children of the anchor, but "
            "tree_candidates is 8; lower num_speculative_tokens or raise tree_candidates",
        ),
        ({"tree_candidates": 1025}, "tree_candidates is 1025, but the vocabulary has 1024 tokens"),
        ({"tree_variant": "chain", "tree_width": 4}, "tree_width is 4, but tree_variant is 'chain'"),
        ({"tree_variant": "fixed", "tree_width": 4}, "tree_width is 4, but tree_variant is 'fixed'"),
        ({"tree_variant": "chain", "tree_depth_bonus": -0.1}, "tree_depth_bonus is -0.1, but tree_variant is 'chain'"),
        ({"tree_widht": 4}, "unknown key 'tree_widht'; did you mean 'tree_width'?"),
        ({"draft_model_config": {}}, "unknown key 'draft_model_config'"),
        ({"tree-width": 4, "tree_width": 5}, "the key 'tree_width' twice"),
        ({"model": "absent"}, "speculative_config has no 'model'"),
        ({"model": "no/such-drafter"}, "model='no/such-drafter', but there is no config.json"),
        ({"prompt_lookup_max": 4}, "prompt_lookup_max is 4, but method 'dartree' has no use for it"),
        ({"suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_depth is 9, but method 'dartree' has"),
        ({"max_model_len": 64}, "max_model_len is 64, but method 'dartree' has no use for it; leave it out"),
        ({"model": ["a"]}, "model is ['a']; it must be the drafter's folder or name on the hub"),
        ({"tree_budget": ""}, "tree_budget is ''; it must be one of 'fixed', 'auto'"),
        (
            {"num_speculative_tokens_per_batch_size": []},
            "num_speculative_tokens_per_batch_size must not be empty. It must list ranges",
        ),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 8], [4, 8, 4]]},
            "ranges must be non-overlapping and sorted. It must list ranges of batch sizes",
        ),
        (
            {"num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 4, 100]]},
            "has 100 nodes for batches of up to 4, but num_speculative_tokens is 8; lower the one",
        ),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction is True, but method 'dartree' has"),
        ({"enable_adaptive_verification": True}, "enable_adaptive_verification is True, but method 'dartree' has"),
        (
            {"draft_sample_method": "probabilistic"},
            "draft_sample_method is 'probabilistic', but method 'dartree' works",
        ),
        ({"rejection_sample_method": "block"}, "rejection_sample_method is 'block', but method 'dartree' works with"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2, but the drafter runs on the target's"),
    ],
)
def test_keys_that_cannot_work_are_refused_in_the_users_words(keys, words):
    assert words in refusal(keys)


def test_keys_that_ask_for_nothing_are_let_through():
    keys = {"use_local_argmax_reduction": False, "prompt_lookup_max": None, "tree_width": None}
    assert engine_args(keys).create_engine_config().speculative_config.tree.width == 12


def test_an_alias_beside_its_key_is_refused():
    assert "speculative_config['num_speculative_tokens'] and spec_tokens are both given" in refusal(
        {"num_speculative_tokens": 4}, spec_tokens=5
    )


def test_a_worker_of_the_users_own_is_refused():
    assert "worker_cls is 'my.Worker', but method 'dartree' brings its own" in refusal(worker_cls="my.Worker")


# --- Drafters that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 96}, "hidden_size is 96 but the target's is 192"),
        ({"vocab_size": 1000}, "vocab_size is 1000 but the target's is 1024"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "ids go from 0 to 4"),
        ({"dflash_config": {"mask_token_id": 1024}}, "mask_token_id is 1024"),
        ({"dflash_config": {"mask_token_id": "absent"}}, "has no 'mask_token_id'"),
        ({"dflash_config": {"target_layer_ids": "absent"}}, "has no 'target_layer_ids'"),
        ({"block_size": "absent"}, "has no 'block_size'"),
        ({"dflash_config": {"gru_hidden_dim": "absent"}}, "has no 'gru_hidden_dim', which the Domino head needs"),
        ({"dflash_config": {"projector_type": "other"}}, "projector_type='other'"),
        ({"dflash_config": {"projector_type": "absent"}, "markov_rank": 4}, "has a markov head"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "has architectures=['Qwen3ForCausalLM']; method 'dartree' drives"),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
            },
            "max_position_embeddings=128 and RoPE of the type yarn, but max_model_len is 512; set max_model_len to",
        ),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(changed, changes, words):
    assert words in refusal({"model": changed(DOMINO, **changes)})


def test_a_target_as_its_own_drafter_is_refused():
    assert "has architectures=['Qwen3ForCausalLM']" in refusal({"model": str(TARGET)})


# --- Features of vLLM ------------------------------------------------------------------------------------------------


def overridden(**keys):
    return {"hf_overrides": keys}


MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "layer_types": "absent",
    "state_size": 8,
    "conv_kernel": 4,
    "intermediate_size": 128,
    "time_step_rank": 8,
}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False},
}
FEATURES = {
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "prefill context parallelism": {"prefill_context_parallel_size": 2},
    "decode context parallelism": {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    "dual-batch overlap": {"enable_dbo": True},
    "batch-sharded sampling": {"enable_batch_sharded_sampling": True},
    "a KV connector": {"kv_offloading_size": 1.0},
    "a quantised KV cache": {"kv_cache_dtype": "fp8"},
    "a checkpoint with a quantised KV cache": overridden(quantization_config=FP8_CACHE),
    "an attention backend of the user's choice": {"attention_config": {"backend": "FLEX_ATTENTION"}},
    "fast prefill with shared KV": {"kv_sharing_fast_prefill": True},
    "watermarking": {"watermark_config": {}},
    "trace replay": {"enable_trace_replay": True},
    "sampling masks": {"return_sampling_mask": True},
    "routed experts in the output": {"enable_return_routed_experts": True},
    "Engram layers": {"engram_config": {}},
    "a diffusion target": overridden(canvas_length=8),
    "a pooling model": {"runner": "pooling", "convert": "embed"},
    "an encoder-decoder target": overridden(is_encoder_decoder=True),
    "a target with recurrent layers": MAMBA,
    "a target with MLA": DEEPSEEK,
    "a target with M-RoPE": overridden(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    ),
    "a target with chunked local attention": overridden(attention_chunk_size=64),
    "a target with dual chunk attention": overridden(dual_chunk_attention_config={"chunk_size": 64}),
    "a target with ALiBi": overridden(alibi=True),
    "a target with reference sliding window attention": overridden(rswa_window=64),
    "a target with attention sinks": overridden(add_swa_attention_sink_bias=True),
    "a target whose layers share KV": overridden(num_kv_shared_layers=2),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_that_cannot_be_combined_are_refused_by_name(name, changed):
    settings = FEATURES[name]
    if "architectures" in settings:
        settings = {"model": changed(TARGET, **settings)}
    message = refusal(**settings)
    assert message.startswith(f"method 'dartree' does not work with {name}")
    assert len(message.split("; ")[-1]) > 5, "there is no remedy"


def test_every_unsupported_feature_is_tested():
    from vllm_dartree.features import UNSUPPORTED

    assert len(UNSUPPORTED) == len(FEATURES)
    for feature in UNSUPPORTED:
        assert any(feature.name.startswith(name) for name in FEATURES), feature.name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_backend": "FLEX_ATTENTION"}, "which is 'FLEX_ATTENTION' here"),
        ({"attention_config": {"backend_per_kind": {"sliding_window": "FLEX_ATTENTION"}}}, "choose one of FLASH_ATTN"),
        (overridden(layer_types=["chunked_attention"] * 5), "a target with chunked local attention"),
        (overridden(add_full_attention_sink_bias=True), "a target with attention sinks"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "a quantised KV cache (kv_cache_dtype), which is 'fp8_e5m2' here"),
        ({"ubatch_size": 2}, "dual-batch overlap"),
    ],
)
def test_other_ways_to_ask_for_them_are_refused(settings, words):
    assert words in refusal(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "FLASHINFER"},
        {"kv_cache_dtype": "bfloat16", **overridden(quantization_config=FP8_CACHE)},
        {"ubatch_size": 0},
    ],
)
def test_what_looks_like_them_is_let_through(settings):
    assert engine_args(**settings).create_engine_config().speculative_config.tree.budget == 64


def test_a_target_that_hands_out_no_hidden_states_is_refused(changed):
    from vllm_dartree.features import DartreeConfigError, check_target_class

    check_target_class(engine_args().create_engine_config())
    gemma = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 32}
    config = engine_args(model=changed(TARGET, **gemma)).create_engine_config()
    with pytest.raises(DartreeConfigError, match="architecture Gemma2ForCausalLM: its drafters read hidden states"):
        check_target_class(config)


def test_the_v1_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert refusal().startswith("VLLM_USE_V2_MODEL_RUNNER is 0")


def test_a_cpu_without_emulation_is_told_about_it(monkeypatch):
    import vllm.triton_utils

    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", False)
    assert "vllm-dartree emulate -- COMMAND" in refusal()


def test_the_finished_config_is_checked_in_the_process_of_the_user(monkeypatch):
    from vllm_dartree import features

    seen = []
    monkeypatch.setattr(features, "check_supported", seen.append)
    assert seen == [engine_args().create_engine_config()]


def test_what_only_the_finished_config_tells_is_refused(monkeypatch):
    from vllm_dartree.features import DartreeConfigError, check_supported

    config = engine_args().create_engine_config()
    check_supported(config)
    with monkeypatch.context() as patch:
        patch.setattr(config.cache_config, "cache_dtype", "fp8_e4m3")
        with pytest.raises(DartreeConfigError, match="a quantised KV cache"):
            check_supported(config)
    with monkeypatch.context() as patch:
        patch.setattr(config.speculative_config, "method", "suffix")
        with pytest.raises(DartreeConfigError, match="V1 model runner, since V2 has no speculative method 'suffix'"):
            check_supported(config)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(DartreeConfigError, match="VLLM_USE_V2_MODEL_RUNNER is 0"):
        check_supported(config)


def test_other_platforms_and_a_gpu_without_triton_are_refused(monkeypatch):
    import vllm.triton_utils
    from vllm.platforms import current_platform

    from vllm_dartree.config import worker_class
    from vllm_dartree.features import DartreeConfigError, check_runner

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(DartreeConfigError, match="runs on NVIDIA GPUs and, for tests, on CPUs"):
        worker_class()
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", False)
    with pytest.raises(DartreeConfigError, match="vLLM finds no working Triton"):
        check_runner()


def test_other_methods_are_not_checked():
    from vllm_dartree.features import check_supported

    args = engine_args({"method": "dflash", "num_speculative_tokens": 7}, enable_trace_replay=True)
    check_supported(args.create_engine_config())


# --- A vLLM that does not fit ----------------------------------------------------------------------------------------


def test_a_vllm_that_lacks_a_seam_refuses_the_method_and_runs_all_others(monkeypatch):
    from vllm_dartree import compat

    seam = compat.Seam("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.renamed")
    monkeypatch.setattr(compat, "SEAMS", (*compat.SEAMS, seam))
    compat.require_installed.cache_clear()
    with pytest.raises(compat.IncompatibleVllmError) as error:
        engine_args().create_engine_config()
    compat.require_installed.cache_clear()
    message = str(error.value)
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner.renamed: 'GPUModelRunner' has no 'renamed'" in message
    assert "cannot run on vLLM" in message and "0.32 or 0.33" in message
    engine_args({"method": "dflash", "num_speculative_tokens": 7}).create_engine_config()


def test_a_vllm_that_cannot_be_taught_still_starts(monkeypatch, caplog):
    from vllm.config import VllmConfig

    from vllm_dartree import plugin

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.delattr(VllmConfig, "num_lookahead_tokens")
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", None)
    plugin.register()
    told = {record.getMessage() for record in caplog.records if "does not fit this vLLM" in record.getMessage()}
    assert len(told) == 2


def test_registering_twice_changes_nothing():
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    from vllm_dartree import plugin

    plugin.register()
    before = (
        EngineArgs.create_speculative_config,
        EngineArgs.create_engine_config,
        SamplingParams._validate_spec_decode,
        VllmConfig.num_lookahead_tokens,
    )
    plugin.register()
    assert before == (
        EngineArgs.create_speculative_config,
        EngineArgs.create_engine_config,
        SamplingParams._validate_spec_decode,
        VllmConfig.num_lookahead_tokens,
    )


# --- Sizes of CUDA graphs ---------------------------------------------------------------------------------------------


def graph_sizes(speculative=None, max_num_seqs=64, **compilation):
    """A finished config, its sizes set as on a GPU: CPUs have no graphs."""
    from vllm.config.compilation import CUDAGraphMode

    config = engine_args(speculative, max_num_seqs=max_num_seqs, max_num_batched_tokens=8192).create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = compilation.get("sizes")
    config.compilation_config.max_cudagraph_capture_size = compilation.get("largest")
    config._set_cudagraph_sizes()
    return config


def graph_requests(config, rows: int) -> dict[int, int]:
    """By number of requests of ``rows`` tokens, the requests of the graph that vLLM's own manager replays for them."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, _is_compatible

    manager = object.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.cudagraph_mode = config.compilation_config.cudagraph_mode.FULL_DECODE_ONLY
    manager.decode_query_len, manager.varlen_decode, manager.ubatch_runner = rows, False, None
    manager.max_num_reqs, manager.lora_capture_cases = config.scheduler_config.max_num_seqs, [0]
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    chosen = {}
    for requests in range(1, manager.max_num_reqs + 1):
        for graph in manager._candidates.get((requests * rows, 0), []):
            if _is_compatible(graph, requests, requests * rows, rows, 0, rows, 1):
                chosen[requests] = graph.num_reqs
                break
    return chosen


@pytest.mark.parametrize("budget", [8, 64])
def test_graphs_cover_trees_and_pad_neither_them_nor_the_drafter(budget):
    from vllm_dartree.graphs import MAX_GRAPH_TOKENS

    config = graph_sizes({"num_speculative_tokens": budget})
    covered = min(64, MAX_GRAPH_TOKENS // (budget + 1))
    for rows in (budget + 1, config.speculative_config.drafter.num_query_rows):
        chosen = graph_requests(config, rows)
        assert set(range(1, covered + 1)).issubset(chosen)
        assert all(graph <= max(requests + 1, 1.125 * requests) for requests, graph in chosen.items())
    assert len(config.compilation_config.cudagraph_capture_sizes) < 130


def test_sizes_follow_the_budgets_of_a_schedule():
    schedule = [[1, 8, 64], [9, 64, 16]]
    config = graph_sizes({"num_speculative_tokens": 64, "num_speculative_tokens_per_batch_size": schedule})
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert 8 * 65 in sizes and 9 * 65 not in sizes
    assert 64 * 17 in sizes and max(sizes) < 65 * 20


def test_any_budget_of_the_automatic_ones_may_come_at_any_batch_size():
    config = graph_sizes({"num_speculative_tokens": 64, "tree_budget": "auto"})
    graphs = 0
    for rows, covered in ((65, 31), (17, 64), (5, 64), (1, 64)):
        chosen = graph_requests(config, rows)
        assert set(range(1, covered + 1)).issubset(chosen)
        graphs += len(set(chosen.values()))
    assert graphs < 200  # vLLM rounds every size up to every number of rows


def test_sizes_that_a_user_gives_are_left_alone():
    assert graph_sizes(sizes=[65, 130]).compilation_config.cudagraph_capture_sizes == [65, 130]
    assert max(graph_sizes(largest=256).compilation_config.cudagraph_capture_sizes) <= 256


def test_other_methods_keep_vllms_sizes():
    from vllm_dartree.graphs import request_counts

    native = graph_sizes({"method": "dflash", "num_speculative_tokens": 15})
    assert max(native.compilation_config.cudagraph_capture_sizes) <= 512
    assert request_counts(20) == [*range(1, 17), 18, 20]
