"""Every seam of vLLM that this package leans on, and two ways to check that a vLLM has them.

``check_installed`` imports the installed vLLM; ``check_source`` only reads an unpacked one, or a wheel. A version bump
starts here: run the second on the new wheel, and what it names is what has to be looked at.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TESTED_VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True)
class Seam:
    """Something in vLLM that has to be there, and as we know it.

    Args:
        module: where it is defined or imported from.
        name: what it is there, dotted below a class; empty for the module itself.
        parameters: names that a function's parameters begin with, ``self`` aside. None: any, since we pass on what
            we are given.
        closed: there must be no further parameters, since we override the function with exactly these. Otherwise
            further ones must have defaults, since we call it without them.
        members: attributes of a class that we read or override.
        platform: the only kind of vLLM build that can import the module; None for all.
    """

    module: str
    name: str = ""
    parameters: tuple[str, ...] | None = None
    closed: bool = False
    members: tuple[str, ...] = ()
    platform: str | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


_V2 = "vllm.v1.worker.gpu"
_DFLASH = f"{_V2}.spec_decode.dflash"
_REJECTION = f"{_V2}.spec_decode.rejection_sampler"
_MODELS = "vllm.model_executor.models"
_BACKENDS = "vllm.v1.attention.backends"
# What tree attention computes or refuses; were one of them renamed, it would do neither.
_OF_IMPL = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")

SEAMS = (
    # Accepting the method, and checking the configuration: plugin.py, config.py.
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        ("target_model_config", "target_parallel_config"),
        closed=True,
    ),
    Seam("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs",
        members=(
            "speculative_config",
            "spec_method",
            "spec_model",
            "spec_tokens",
            "kv_cache_dtype",
            "kv_sharing_fast_prefill",
            "kv_offloading_size",
            "kv_transfer_config",
            "watermark_config",
            "aux_output_config",
            "engram_config",
            "attention_config",
        ),
    ),
    Seam("vllm.config", "AttentionConfig", members=("backend", "backend_per_kind")),
    Seam("vllm.model_executor.model_loader", "get_model_architecture", ("model_config",)),
    Seam("vllm.model_executor.models.interfaces", "supports_eagle3", ("model",)),
    Seam(
        "vllm.config",
        "SpeculativeConfig",
        members=(
            "method",
            "model",
            "num_speculative_tokens",
            "num_speculative_tokens_per_batch_size",
            "uses_dynamic_speculative_decoding",
            "draft_model_config",
            "draft_sample_method",
            "rejection_sample_method",
            "draft_tensor_parallel_size",
            "max_num_new_slots_for_drafting",
        ),
    ),
    Seam("vllm.config", "SpeculativeConfig.use_eagle_block_drop", (), closed=True),
    Seam("vllm.config", "SpeculativeConfig.update_arch_", ()),
    Seam("vllm.config.utils", "config"),
    Seam(
        "vllm.config",
        "ModelConfig",
        members=(
            "hf_config",
            "hf_text_config",
            "architecture",
            "architectures",
            "max_model_len",
            "dtype",
            "runner_type",
            "logits_processors",
            "get_diff_sampling_param",
            "served_model_name",
            "enable_trace_replay",
            "return_sampling_mask",
            "is_diffusion",
            "is_encoder_decoder",
            "is_hybrid",
            "is_attention_free",
            "has_inner_state",
            "use_mla",
            "uses_mrope",
            "uses_alibi",
            "attention_chunk_size",
            "rswa_window",
        ),
    ),
    Seam(
        "vllm.config",
        "ParallelConfig",
        members=(
            "worker_cls",
            "tensor_parallel_size",
            "data_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "use_ubatching",
            "enable_batch_sharded_sampling",
        ),
    ),
    Seam("vllm.config.aux_output", "AuxOutputConfig", members=("enabled",)),
    Seam("vllm.config", "CacheConfig", members=("block_size", "cache_dtype", "kv_sharing_fast_prefill")),
    Seam(
        "vllm.config",
        "VllmConfig",
        members=(
            "speculative_config",
            "model_config",
            "parallel_config",
            "cache_config",
            "scheduler_config",
            "compilation_config",
            "kv_transfer_config",
            "watermark_config",
            "aux_output_config",
            "engram_config",
            "attention_config",
            "use_v2_model_runner",
            "num_lookahead_tokens",
        ),
    ),
    Seam("vllm.config", "VllmConfig._get_v2_model_runner_unsupported_features", ()),
    Seam("vllm.config", "get_layers_from_vllm_config", ("vllm_config", "layer_type")),
    Seam("vllm.config.compilation", "CUDAGraphMode.has_full_cudagraphs", (), closed=True),
    Seam("vllm.config", "VllmConfig._set_cudagraph_sizes", (), closed=True),
    Seam(
        "vllm.config",
        "CompilationConfig",
        members=("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    ),
    Seam(
        "vllm.v1.spec_decode.dynamic.utils",
        "validate_and_normalize_dynamic_sd_schedule",
        ("num_speculative_tokens_per_batch_size",),
    ),
    Seam(
        "vllm.v1.spec_decode.dynamic.utils",
        "build_dynamic_sd_schedule_lookup",
        ("num_speculative_tokens_per_batch_size", "vllm_max_batch_size", "vllm_num_speculative_tokens"),
    ),
    Seam("vllm.config", "SchedulerConfig", members=("max_num_seqs", "max_num_batched_tokens")),
    Seam("vllm.exceptions", "VLLMValidationError"),
    Seam("vllm.v1.engine.input_processor", "InputProcessor", members=("vllm_config",)),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        (
            "request_id",
            "prompt",
            "params",
            "supported_tasks",
            "arrival_time",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "resumable",
        ),
    ),
    Seam("vllm.sampling_params", "SamplingParams._validate_spec_decode", ("speculative_config",), closed=True),
    Seam(
        "vllm",
        "SamplingParams",
        members=("bad_words_token_ids",),
    ),
    Seam("vllm.platforms", "current_platform"),
    Seam("vllm.triton_utils", "HAS_TRITON"),
    Seam("vllm.envs", "VLLM_BATCH_INVARIANT"),
    Seam("vllm", "ModelRegistry"),
    Seam("vllm", "LLM"),
    # Worker and runner: engine/worker.py, engine/cpu_worker.py, engine/runner.py.
    Seam("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", (), closed=True),
    Seam("vllm.v1.worker.gpu_worker", "Worker", members=("vllm_config", "device")),
    Seam("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", (), closed=True, platform="cpu"),
    Seam("vllm.v1.worker.cpu.model_runner", "CPUModelRunner", platform="cpu"),
    Seam(f"{_V2}.model_runner", "GPUModelRunner.__init__", ("vllm_config", "device"), closed=True),
    Seam(f"{_V2}.model_runner", "GPUModelRunner.prepare_attn", ("input_batch",), closed=True),
    Seam(f"{_V2}.model_runner", "GPUModelRunner._dummy_sampler_run", ("hidden_states",), closed=True),
    Seam(f"{_V2}.model_runner", "GPUModelRunner.add_requests", ("scheduler_output",), closed=True),
    Seam(
        f"{_V2}.model_runner",
        "GPUModelRunner",
        members=(
            "load_model",
            "execute_model",
            "speculator",
            "rejection_sampler",
            "req_states",
            "model",
            "max_num_tokens",
            "max_num_reqs",
            "decode_query_len",
            "vllm_config",
            "speculative_config",
            "model_config",
            "device",
        ),
    ),
    Seam(
        f"{_V2}.model_runner",
        "GPUModelRunner._set_active_loras",
        ("prompt_lora_mapping", "token_lora_mapping", "lora_requests"),
    ),
    Seam("vllm.lora.request", "LoRARequest"),
    Seam("vllm.v1.core.sched.output", "SchedulerOutput", members=("scheduled_new_reqs", "num_scheduled_tokens")),
    Seam("vllm.v1.core.sched.output", "NewRequestData", members=("req_id", "sampling_params")),
    Seam(f"{_V2}.states", "RequestState", members=("req_id_to_index", "prefill_len")),
    Seam(
        f"{_V2}.input_batch",
        "InputBatch",
        members=(
            "num_reqs",
            "num_tokens",
            "num_draft_tokens",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "has_structured_output_reqs",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "query_start_loc",
            "input_ids",
            "positions",
            "logits_indices",
            "cu_num_logits",
            "cu_num_logits_np",
        ),
    ),
    # Propose: engine/speculator.py, engine/draft_models/.
    Seam(f"{_DFLASH}.speculator", "DFlashSpeculator.__init__", ("vllm_config", "device"), closed=True),
    Seam(
        f"{_DFLASH}.speculator",
        "DFlashSpeculator.load_draft_model",
        ("target_model", "target_attn_layer_names"),
        closed=True,
    ),
    Seam(f"{_DFLASH}.speculator", "DFlashSpeculator._num_graph_context_tokens", ("num_reqs",), closed=True),
    Seam(
        f"{_DFLASH}.speculator",
        "DFlashSpeculator._generate_draft",
        (
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
        closed=True,
    ),
    Seam(
        f"{_DFLASH}.speculator",
        "DFlashSpeculator._run_model",
        ("num_tokens", "attn_metadata", "slot_mappings", "num_tokens_across_dp", "cudagraph_runtime_mode"),
    ),
    Seam(
        f"{_DFLASH}.speculator",
        "DFlashSpeculator.propose",
        (
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
    Seam(
        f"{_DFLASH}.speculator",
        "DFlashSpeculator",
        members=(
            "_speculator_name",
            "method",
            "model",
            "hidden_states",
            "max_num_reqs",
            "max_num_tokens",
            "num_speculative_steps",
            "num_query_per_req",
            "sample_from_anchor",
            "sample_indices",
            "sample_idx_mapping",
            "input_buffers",
            "draft_tokens",
            "draft_attn_layer_names",
        ),
    ),
    Seam(f"{_DFLASH}.utils", "load_dflash_model", ("target_model", "vllm_config")),
    Seam(f"{_V2}.spec_decode.dspark.utils", "load_dspark_model", ("target_model", "vllm_config")),
    Seam("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Seam(
        f"{_MODELS}.qwen3_dflash",
        "DFlashQwen3ForCausalLM",
        members=("embed_input_ids", "compute_logits", "load_weights", "model", "config"),
    ),
    Seam(f"{_MODELS}.qwen3_dflash", "DFlashQwen3ForCausalLM.load_weights", ("weights",), closed=True),
    Seam(f"{_MODELS}.qwen3_dflash", "DFlashQwen3Model", members=("layers", "hidden_norm")),
    Seam(f"{_MODELS}.qwen3_dflash", "DFlashQwen3Model._normalize_context_k", ("all_k",), closed=True),
    Seam(
        f"{_MODELS}.qwen3_dspark",
        "Qwen3DSparkForCausalLM",
        members=("logits_processor", "target_vocab_size", "draft_id_to_target_id", "model", "config"),
    ),
    Seam(f"{_MODELS}.qwen3_dspark", "Qwen3DSparkForCausalLM.compute_draft_logits", ("hidden_states",)),
    Seam(f"{_MODELS}.qwen3_dspark", "Qwen3DSparkForCausalLM.map_draft_to_target", ("draft_ids",)),
    Seam(f"{_MODELS}.qwen3_dspark", "DSparkMarkovHead", members=("markov_w1", "markov_w2", "apply_bias_gathered")),
    Seam(f"{_MODELS}.qwen3_dspark", "DSparkMarkovHead.embed", ("token_ids",)),
    Seam("vllm.model_executor.layers.logits_processor", "LogitsProcessor", members=("scale", "soft_cap")),
    Seam(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils",
        "dequantize_to_dtype",
        ("tensor_fp4", "tensor_sf", "global_scale", "dtype", "block_size", "swizzle"),
    ),
    Seam(f"{_MODELS}.qwen3_dflash2", "DFlash2Qwen3ForCausalLM.compute_candidates", ("hidden_states",)),
    Seam(
        f"{_MODELS}.qwen3_dflash2",
        "CandidateSelector.forward",
        ("candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"),
    ),
    Seam(f"{_MODELS}.lilicorr", "LiLiCorrForCausalLM.compute_candidates", ("hidden_states",)),
    Seam(
        f"{_MODELS}.lilicorr",
        "LiLiCorrHead.forward",
        ("token_embeddings", "candidate_log_probs", "pass_hidden", "anchor_hidden", "anchor_valid"),
    ),
    Seam(
        "vllm.transformers_utils.configs.speculators",
        "SpeculatorsConfig.extract_transformers_pre_trained_config",
    ),
    Seam(
        f"{_MODELS}.qwen3_dflash",
        "DFlashQwen3Model._build_context_kv_buffers",
        ("layers_attn", "has_bias"),
        closed=True,
    ),
    # Verify: engine/attention.py, engine/kv_layout.py.
    Seam(
        "vllm.model_executor.layers.attention",
        "Attention",
        members=(
            "impl",
            "attn_backend",
            "kv_cache",
            "kv_cache_dtype",
            "head_size",
            "head_size_v",
            "attn_type",
            "kv_sharing_target_layer_name",
        ),
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionImpl",
        members=("num_heads", "head_size", "scale"),
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionBackend",
        members=("get_name", "get_builder_cls", "forward_includes_kv_cache_update"),
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata"),
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build_for_cudagraph_capture",
        ("common_attn_metadata",),
        closed=True,
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder",
        members=(
            "vllm_config",
            "device",
            "kv_cache_spec",
            "get_cudagraph_support",
            "get_varlen_cudagraph_max_query_len",
        ),
    ),
    Seam("vllm.v1.attention.backend", "AttentionCGSupport", members=("UNIFORM_BATCH",)),
    Seam("vllm.v1.attention.backend", "AttentionType", members=("DECODER",)),
    Seam(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        members=("num_reqs", "query_start_loc", "seq_lens", "max_seq_len", "max_query_len", "block_table_tensor"),
    ),
    Seam("vllm.v1.attention.backend", "AttentionImpl", members=("fused_output_quant_supported",)),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Seam(f"{_BACKENDS}.flash_attn", "FlashAttentionImpl", members=_OF_IMPL, platform="cuda"),
    Seam(f"{_BACKENDS}.flashinfer", "FlashInferImpl", members=_OF_IMPL, platform="cuda"),
    Seam(f"{_BACKENDS}.triton_attn", "TritonAttentionImpl", members=(*_OF_IMPL, "chunk_lookback")),
    Seam(f"{_BACKENDS}.cpu_attn", "CPUAttentionBackendImpl", members=_OF_IMPL, platform="cpu"),
    Seam(f"{_BACKENDS}.cpu_attn", "CPUAttentionMetadataBuilder._set_isa_to_layers", ("layer_names",), platform="cpu"),
    Seam(
        "vllm._custom_ops",
        "cpu_attn_reshape_and_cache",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "isa"),
    ),
    # Accept: engine/sampler.py.
    Seam(
        _REJECTION,
        "RejectionSampler.__init__",
        ("sampler", "spec_config", "device"),
    ),
    Seam(
        _REJECTION,
        "RejectionSampler.__call__",
        ("logits", "input_batch", "draft_logits", "invalid_drafts"),
        closed=True,
    ),
    Seam(_REJECTION, "_iter_request_chunks", ("cu_num_logits", "max_chunk_logits")),
    Seam(_REJECTION, "get_max_chunk_logits", ("vocab_size",)),
    Seam(
        f"{_V2}.sample.sampler",
        "Sampler.sample",
        (
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "return_logprobs",
        ),
    ),
    Seam(
        f"{_V2}.sample.sampler",
        "Sampler",
        members=(
            "logprobs_mode",
            "compute_nans",
            "logprob_token_ids_state",
            "req_states",
            "logits_processors",
            "thinking_budget_state",
        ),
    ),
    Seam(f"{_V2}.sample.sampler", "Sampler.get_logprobs_dims", ("idx_mapping_np",)),
    Seam(
        f"{_V2}.sample.logprob",
        "compute_topk_scores",
        (
            "logits",
            "num_logprobs",
            "sampled_token_ids",
            "cu_num_logits",
            "logprob_token_ids_state",
            "expanded_idx_mapping",
            "max_per_req_token_ids",
            "logits_mode",
        ),
    ),
    Seam(
        f"{_V2}.sample.output",
        "SamplerOutput",
        members=("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
    ),
    Seam(f"{_V2}.metrics.logits", "get_num_nans", ("logits",)),
    Seam(
        f"{_V2}.input_batch",
        "get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    Seam("vllm.v1.sample.logits_processor", "LOGITSPROCS_GROUP"),
    # Logits processing along paths: engine/path_processors.py.
    Seam(f"{_V2}.sample.logit_bias", "LogitBiasState"),
    Seam(f"{_V2}.sample.logits_processor.interface", "LogitsProcessor.add_request", ("req_idx", "sampling_params")),
    Seam(
        f"{_V2}.sample.logits_processor",
        "LogitsContext",
        members=("expanded_idx_mapping", "idx_mapping_np", "expanded_local_pos"),
    ),
    Seam(f"{_V2}.sample.penalties", "PenaltiesState.apply", ("logits", "ctx"), closed=True),
    Seam(
        f"{_V2}.sample.penalties",
        "PenaltiesState",
        members=(
            "use_penalty",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "output_bin_counts",
        ),
    ),
    Seam(f"{_V2}.sample.bad_words", "BadWordsState.apply", ("logits", "ctx"), closed=True),
    Seam(f"{_V2}.sample.bad_words", "BadWordsState.add_request", ("req_idx", "sampling_params"), closed=True),
    Seam(
        f"{_V2}.sample.bad_words",
        "BadWordsState",
        members=("num_bad_words", "bad_word_token_ids", "bad_word_offsets", "req_states"),
    ),
    Seam(f"{_V2}.sample.thinking_budget", "ThinkingBudgetState.apply", ("logits", "ctx"), closed=True),
    Seam(
        f"{_V2}.sample.thinking_budget",
        "ThinkingBudgetState",
        members=(
            "enabled",
            "use_thinking_budget",
            "thinking_token_budget",
            "reasoning_start_token_ids",
            "natural_reasoning_end_token_ids",
            "reasoning_end_token_ids",
            "cached_last_start",
            "cached_last_end",
            "req_states",
        ),
    ),
    Seam("vllm.distributed.parallel_state", "is_global_first_rank", ()),
    Seam("vllm.v1.outputs", "LogprobsTensors.cat", ("tensors", "cu_num_generated_tokens")),
    # Metrics: plugin.py, metrics.py.
    Seam("vllm.v1.metrics.loggers", "LoggingStatLogger", members=("vllm_config", "spec_decoding_logging")),
    Seam(
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger",
        members=("vllm_config", "per_engine_labelvalues", "_counter_cls", "_histogram_cls"),
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger.record",
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        closed=True,
    ),
    Seam("vllm.v1.metrics.utils", "create_metric_per_engine", ("metric", "per_engine_labelvalues")),
    Seam("vllm.v1.spec_decode.metrics", "SpecDecodingLogging.__init__", ()),
    Seam("vllm.v1.spec_decode.metrics", "SpecDecodingLogging.log", ("log_fn",), closed=True),
    Seam(
        "vllm.v1.spec_decode.metrics",
        "SpecDecodingLogging",
        members=(
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "accepted_tokens_per_pos_lists",
            "last_log_time",
        ),
    ),
    Seam(
        "vllm.v1.spec_decode.metrics",
        "SpecDecodingStats",
        members=("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"),
    ),
    # Grammars on trees: plugin.py, grammars.py, engine/runner.py.
    Seam(
        "vllm.v1.structured_output", "StructuredOutputManager.validate_tokens", ("request", "spec_tokens"), closed=True
    ),
    Seam(
        "vllm.v1.structured_output",
        "StructuredOutputManager.grammar_bitmask",
        ("requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        closed=True,
    ),
    Seam("vllm.v1.structured_output", "StructuredOutputManager._get_constraint_bounds", ("request", "spec_tokens")),
    Seam("vllm.v1.structured_output", "StructuredOutputManager._fill_bitmasks", ("batch",)),
    Seam("vllm.v1.structured_output", "StructuredOutputManager._get_reasoner", ("request",)),
    Seam("vllm.v1.structured_output", "StructuredOutputManager", members=("vllm_config", "_grammar_bitmask")),
    Seam(
        "vllm.parser.engine.adapters",
        "ParserEngineReasoningAdapter",
        members=("reasoning_end_token_ids", "find_reasoning_end"),
    ),
    Seam("vllm.v1.core.sched.output", "GrammarOutput", members=("num_acceptable_drafts",)),
    Seam(
        f"{_V2}.structured_outputs",
        "grammar_invalid_drafts",
        ("input_batch", "grammar_req_ids", "num_acceptable_drafts"),
    ),
    Seam(
        "vllm.reasoning.basic_parsers",
        "BaseThinkingReasoningParser",
        members=("is_reasoning_end_streaming", "end_token_id"),
    ),
    Seam("vllm.v1.structured_output", "ConstraintBounds", members=("grammar_start", "constraint_start")),
    Seam(
        "vllm.v1.structured_output.backend_types",
        "StructuredOutputGrammar",
        members=("accept_tokens", "validate_tokens", "rollback", "is_terminated"),
    ),
    Seam("vllm.v1.request", "Request", members=("request_id", "structured_output_request")),
    Seam(f"{_V2}.spec_decode.utils", "DraftTokensHandler.__init__", ("device",)),
    Seam(
        f"{_V2}.spec_decode.utils", "DraftTokensHandler.set_draft_tokens", ("input_batch", "draft_tokens"), closed=True
    ),
    # The budget by load: plugin.py, budget.py.
    Seam("vllm.v1.core.sched.scheduler", "Scheduler", members=("dynamic_sd_lookup", "running")),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.make_spec_decoding_stats"),
    # Emulation: emulation/.
    Seam(
        "vllm.distributed.device_communicators.cpu_communicator",
        "CpuCommunicator.all_gather",
        ("input_", "dim"),
        closed=True,
        platform="cpu",
    ),
    Seam("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p_triton", ("logits", "k", "p")),
    Seam("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p_pytorch", ("logits", "k", "p")),
)


@dataclass(frozen=True)
class Problem:
    """A seam that is not as it should be."""

    seam: Seam
    what: str

    def __str__(self) -> str:
        return f"{self.seam}: {self.what}"


class IncompatibleVllmError(ValueError):
    """The method was asked for on a vLLM that lacks a seam."""


@dataclass(frozen=True)
class _Parameter:
    name: str
    has_default: bool


def _parameter_problem(seam: Seam, found: list[_Parameter]) -> str | None:
    """``found`` are the named parameters of a function, ``self`` left out."""
    names = [parameter.name for parameter in found]
    expected = list(seam.parameters or ())
    if names[: len(expected)] != expected:
        return f"its parameters are ({', '.join(names)}), expected were ({', '.join(expected)})"
    further = found[len(expected) :]
    if seam.closed and further:
        return f"it takes further parameters: {', '.join(parameter.name for parameter in further)}"
    needed = [parameter.name for parameter in further if not parameter.has_default]
    if needed:
        return f"it needs further parameters: {', '.join(needed)}"
    return None


# --- By reading the source -------------------------------------------------------------------------------------------


class Folder(Protocol):
    """A ``pathlib.Path`` or a ``zipfile.Path`` of what holds the folder ``vllm``."""

    def joinpath(self, *parts: str) -> "Folder": ...
    def is_file(self) -> bool: ...
    def read_text(self, encoding: str) -> str: ...


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or a class, those under ``if`` and ``try`` included."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(statement, block, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _targets(statement: ast.AST) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    elif isinstance(statement, ast.AnnAssign):
        yield statement.target


def _own_members(cls: ast.ClassDef) -> dict[str, ast.stmt]:
    """Methods and attributes of a class body, and what its methods assign to ``self``."""
    members: dict[str, ast.stmt] = {}
    for statement in _statements(cls.body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            members[statement.name] = statement
            for inner in ast.walk(statement):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self":
                        members.setdefault(target.attr, inner)
        for target in _targets(statement):
            if isinstance(target, ast.Name):
                members.setdefault(target.id, statement)
    return members


class _Source:
    """Names of a source tree, looked up as Python would: through imports and base classes."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._trees: dict[str, tuple[ast.Module, bool] | None] = {}
        self._members: dict[ast.ClassDef, dict[str, ast.stmt]] = {}

    def tree(self, module: str) -> tuple[ast.Module, bool] | None:
        """The module's tree and whether it is a package; None if there is no such file."""
        if module not in self._trees:
            self._trees[module] = None
            path = module.replace(".", "/")
            for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
                place = self.folder.joinpath(file)
                if place.is_file():
                    self._trees[module] = (ast.parse(place.read_text(encoding="utf-8")), is_package)
                    break
        return self._trees[module]

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """The statement that defines a top-level name, and the module that it stands in."""
        loaded = self.tree(module)
        if loaded is None or depth > 8:
            return None
        tree, is_package = loaded
        found: tuple[str, ast.AST] | None = None
        for statement in _statements(tree.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and statement.name == name:
                found = module, statement
            elif any(isinstance(target, ast.Name) and target.id == name for target in _targets(statement)):
                found = found or (module, statement)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and found is None:
                        origin = self._origin(statement, module, is_package)
                        found = self.find(origin, alias.name, depth + 1)
                        if found is None and self.tree(f"{origin}.{alias.name}"):
                            found = f"{origin}.{alias.name}", self.tree(f"{origin}.{alias.name}")[0]
        return found

    @staticmethod
    def _origin(statement: ast.ImportFrom, module: str, is_package: bool) -> str:
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def member(self, module: str, cls: ast.ClassDef, name: str) -> ast.stmt | None:
        """A member of a class or of one of its base classes in this source tree."""
        if cls not in self._members:
            self._members[cls] = _own_members(cls)
        if name in self._members[cls]:
            return self._members[cls][name]
        for base in cls.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self.member(*found, name)
                if inherited is not None:
                    return inherited
        return None

    def problem(self, seam: Seam) -> str | None:
        if self.tree(seam.module) is None:
            return "there is no such module"
        if not seam.name:
            return None
        top, *rest = seam.name.split(".")
        found = self.find(seam.module, top)
        if found is None:
            return f"the module has no '{top}'"
        module, node = found
        for part in rest:
            inner = self.member(module, node, part) if isinstance(node, ast.ClassDef) else None
            if inner is None:
                return f"'{top}' has no '{part}'"
            node = inner
        for name in seam.members:
            if not isinstance(node, ast.ClassDef) or self.member(module, node, name) is None:
                return f"it has no '{name}'"
        if seam.parameters is None:
            return None
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return "it is not a function"
        return _parameter_problem(seam, _parameters_of(node, is_method=bool(rest)))


def _parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> list[_Parameter]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    found = [_Parameter(argument.arg, i >= without) for i, argument in enumerate(positional)]
    static = any(getattr(decorator, "id", None) == "staticmethod" for decorator in function.decorator_list)
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found[is_method and not static :] + [_Parameter(a.arg, default is not None) for a, default in keywords]


def check_source(folder: Folder) -> list[Problem]:
    """Seams that an unpacked vLLM lacks, without importing any of it.

    Args:
        folder: what holds the folder ``vllm``: a ``site-packages``, an unpacked wheel, or ``zipfile.Path`` of a wheel.
    """
    source = _Source(folder)
    return [Problem(seam, what) for seam in SEAMS if (what := source.problem(seam)) is not None]


# --- By importing the installed one ----------------------------------------------------------------------------------


def _has_member(cls: Any, name: str) -> bool:
    if hasattr(cls, name) or any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__):
        return True
    for base in cls.__mro__[:-1]:
        # What a constructor assigns can only be read off its source.
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        if isinstance(tree.body[0], ast.ClassDef) and name in _own_members(tree.body[0]):
            return True
    return False


def _installed_problem(seam: Seam) -> str | None:
    try:
        found: Any = importlib.import_module(seam.module)
    except Exception as error:  # a half-built vLLM raises anything, and all of it means the same here
        return f"the module cannot be imported: {type(error).__name__}: {error}"
    parts = seam.name.split(".") if seam.name else []
    for i, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError:
            return f"'{parts[i - 1]}' has no '{part}'" if i else f"the module has no '{part}'"
    for name in seam.members:
        if not inspect.isclass(found) or not _has_member(found, name):
            return f"it has no '{name}'"
    if seam.parameters is None:
        return None
    function = inspect.unwrap(found.fget if isinstance(found, property) else found)
    if not callable(function):
        return "it is not a function"
    named = [
        _Parameter(parameter.name, parameter.default is not parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    is_method = bool(parts[1:]) and bool(named) and named[0].name == "self"
    return _parameter_problem(seam, named[is_method:])


def check_installed() -> list[Problem]:
    """Seams that the installed vLLM lacks; imports all the modules that this package leans on."""
    from vllm.platforms import current_platform

    return [
        Problem(seam, what)
        for seam in SEAMS
        if seam.platform in (None, current_platform.device_type) and (what := _installed_problem(seam)) is not None
    ]


def installed_folder() -> Path | None:
    """Where the installed vLLM's folder lies; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).parent


@functools.cache
def require_installed() -> None:
    """Refuses to start the method on a vLLM that lacks a seam.

    By its source: importing the runner's modules belongs into the worker's process, where the device is set up.

    Raises:
        IncompatibleVllmError: with vLLM's version, the seams and the fix.
    """
    problems = check_source(installed_folder())
    if problems:
        from vllm import __version__

        listed = "".join(f"\n  {problem}" for problem in problems)
        raise IncompatibleVllmError(
            f"method 'dartree' cannot run on vLLM {__version__}, which lacks what it leans on:{listed}\n"
            f"Install a version that it was made for ({' or '.join(TESTED_VERSIONS)}), or a newer vllm-dartree; all "
            "other methods of vLLM work as before"
        )
