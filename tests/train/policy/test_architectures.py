"""Every model that transformers knows as a causal language model and vLLM serves: its rows are computed as each alone.

A tiny random model of each type has the log-probabilities and gradients of transformers' eager attention, one sequence
at a time: in packed rows and in trees of shared prompts where :func:`.packs` says so, else in padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from dev.gpu.attention import eager, packed, padded, tree
from packaging.version import Version
from programs import ROOT
from torch import Tensor
from transformers import AutoModelForCausalLM, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from groundwire.train.policy.attention import (
    MISCOMPUTED,
    has_plain_head,
    packs,
)

# vLLM 0.24.0, vllm/model_executor/models/registry.py: the models that generate text, one of transformers' backend, and
# two with images whose decoders transformers knows as causal language models. "ForCausalLM" is left out at the end.
VLLM = """
    AXK1 Afmoe Apertus Aquila AquilaModel Arcee Arctic BaiChuan Baichuan BailingMoe BailingMoeV2 BailingMoeV2_5
    Bloom ChatGLMForConditionalGeneration ChatGLMModel Cohere2 Cohere2Moe Cohere Cwm Dbrx DeciLM Deepseek DeepseekV2
    DeepseekV32 DeepseekV3 DeepseekV4 Ernie4_5 Ernie4_5_Moe Exaone4 Exaone ExaoneMoE Fairseq2Llama Falcon FalconH1
    FalconMamba FlexOlmo GPT2LMHeadModel GPTBigCode GPTJ GPTNeoX Gemma2 Gemma3 Gemma3n Gemma4 Gemma Glm4 Glm4Moe
    Glm4MoeLite Glm GlmMoeDsa GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared GritLM Grok1 Grok1Model
    HCXVision HCXVisionV2 HYV3 HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX IQuestCoder IQuestLoopCoder InternLM2
    InternLM3 Jais2 Jamba KimiLinear LLaMA Laguna Lfm2 Lfm2Moe Llama4 Llama LongcatFlash MPT Mamba2 Mamba Mellum
    MiMo MiMoV2Flash MiMoV2 MiniCPM3 MiniCPM MiniMaxM2 MiniMaxM3Sparse Ministral3 Mistral MistralLarge3 Mixtral Mpt
    Nemotron NemotronH NemotronHPuzzle OPT Olmo2 Olmo3 Olmo OlmoHybrid Olmoe Orion Ouro PanguEmbedded PanguProMoEV2
    PanguUltraMoE Param2MoE Persimmon Phi3 Phi PhiMoE Plamo2 Plamo3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next RW Rnj1
    SarvamMLA SarvamMoE SeedOss Solar StableLMEpoch StableLm Starcoder2 Step1 Step3Text Step3p5 TeleChat2 TeleChat3
    TeleChat TeleFLM Zamba2 SmolLM3 Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
""".split()  # noqa: SIM905
SERVED = {name.lower().removesuffix("forcausallm") for name in VLLM} | {"qwen3_5", "qwen3_5moe"}
TYPES = sorted(
    kind
    for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if architecture.lower().removesuffix("forcausallm") in SERVED
    # of a model with images; its decoder has a type of its own
    and f"{kind}_text" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "mamba_d_ssm"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "q_lora_rank", "o_lora_rank", "ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "max_window_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "index_topk", "rotary_dim"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "o_groups"), 1),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "ssm_state_size", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "state_size", "num_heads", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("sliding_window", "query_pre_attn_scalar", "attention_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("use_sliding_window", "lm_head_bias"), True),
    **dict.fromkeys(("num_kv_shared_layers", "logits_scaling", "num_experts_per_token", "attn_layer_period"), 2),
    "final_logit_softcapping": 5.0,
    "attn_layer_offset": 1,
    "index_n_heads": 32,  # with few heads many scores are exactly 0, and the largest ones are not defined
}
"""Settings by their name in any configuration."""
LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention has no grouped heads
KINDS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
MAMBA = ["linear_attention", "full_attention"] * 2
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "sarvam_mla"), LATENT),
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "gemma4_text", "laguna", "mellum", "qwen2", "qwen3"), KINDS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONV),
    "granitemoehybrid": {"layer_types": MAMBA},
    "kimi_linear": {"layer_types": MAMBA, **LATENT},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32},
    },
}
"""Settings of a type: the layers of all kinds that its models have."""


def tiny(kind: str) -> Any:
    """A model of this type with random weights that make its attention matter."""
    config = CONFIG_MAPPING[kind]
    known = config().to_dict().keys()
    settings = {name: value for name, value in TINY.items() if name in known} | MORE.get(kind, {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**settings), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and (spread := float(parameter.std())) > 0:
                parameter.mul_(0.2 / spread)
    return model


PAGE = " ".join((ROOT / "docs" / "verl.md").read_text(encoding="utf-8").split())
PADDED = PAGE.partition("share no prompts:")[2].partition("images")[0]
PROMPT, *REPLIES = (torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (19, 12, 5, 14))
SEQUENCES = [torch.cat([PROMPT, reply]) for reply in REPLIES]


def outcome(model: Any, rows: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities of all tokens after each, and the gradient of those of the next ones."""
    model.zero_grad()
    found = rows(model, PROMPT, REPLIES).float().log_softmax(-1)
    labels = torch.cat([ids.roll(-1) for ids in SEQUENCES])
    found.gather(1, labels[:, None]).mean().backward()
    return found.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected.detach()).abs().max())


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_every_type_have_the_log_probabilities_and_gradients_of_each_sequence_alone(kind: str) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    model = tiny(kind)
    states: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach()))
    expected, gradients = outcome(model, eager)
    if kind in MISCOMPUTED:
        with pytest.raises(AssertionError):  # as attention_settings says
            assert _difference(outcome(model, padded)[0], expected) < 1e-4
        return
    for rows in (packed, tree, padded) if packs(model.config) else (padded,):
        found, got = outcome(model, rows)
        assert _difference(found, expected) < 1e-4, rows.__name__
        assert got.keys() == gradients.keys()
        far = [
            name for name in got if _difference(got[name], gradients[name]) > 1e-4 * max(1, gradients[name].abs().max())
        ]
        assert not far, rows.__name__
    head = torch.cat([state[0] for state in states[: len(SEQUENCES)]]) @ model.get_output_embeddings().weight.T
    assert not has_plain_head(model.config) or _difference(head.log_softmax(-1), expected) < 1e-4
    row = "packed" if packs(model.config) else "padded"
    assert Version(transformers.__version__) < Version("5.24") or (f"`{kind}`" in PADDED) == (row == "padded"), (
        f"docs/verl.md: its rows are {row}"
    )
