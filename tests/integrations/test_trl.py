"""TRL's trainers with ``use_liger_kernel``: losses, weights and every metric that both of their
paths log. With the newest version, each comparison also checks a row of the table of trainers in
docs/guides/trl.md; ``LIGER_WRITE=1`` writes the rows instead."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import processes
import pytest
import torch
from hf_models import DEVICE, make, served_by_kernels_or_references
from torch import nn
from watching import calls_of

trl = pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: make setup")

import tokenizers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from liger_kernel.transformers.head.recipe import DeferredLogits
from liger_kernel.transformers.patching.patches import is_patched

datasets.disable_progress_bars()
VERSION = Version(trl.__version__)
FUSED = Version("1.13") > VERSION  # later versions have losses of their own, and take our layers alone
LETTERS = "abcdefghijklmnopqrstuvwxyz .,?!0123456789"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}!{% "
    "endgeneration %}"
    "{% else %}{{ m['content'] }}.{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def smoke(*values: Any) -> Any:
    """A parameter that .ci/run takes as well; the others are nightly."""
    return pytest.param(*values, marks=pytest.mark.smoke)


def tokenizer() -> PreTrainedTokenizerFast:
    # GOLD wants bytes
    words = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS.replace(" ", "Ġ")])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    names = ["input_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(tokenizer_object=model, model_input_names=names, **special)
    made.chat_template = TEMPLATE
    return made


def rows(kind: str) -> Any:
    prompts = ["what is it", "say", "how many are", "who is there?"] * 2
    good, bad = [f"it is {i} indeed" for i in range(8)], [f"no {i}" * (1 + i % 3) for i in range(8)]
    chat = [[{"role": "user", "content": p}, {"role": "assistant", "content": a}] for p, a in zip(prompts, good)]
    texts = [good[i] if i % 2 else bad[i] for i in range(8)]
    kinds = {
        "text": {"text": [p + " " + a for p, a in zip(prompts, good)]},
        "chat": {"messages": chat},
        "pairs": {"prompt": prompts, "chosen": good, "rejected": bad},
        "unpaired": {"prompt": prompts, "completion": texts, "label": [bool(i % 2) for i in range(8)]},
        "triples": {"prompt": prompts, "chosen": good, "rejected": bad, "reference": good[::-1]},
        "prompts": {"prompt": prompts},
    }
    return datasets.Dataset.from_dict(kinds[kind])


def taught(
    folder: Path, trainer: str, kind: str, use: bool, model: nn.Module | None = None, trainer_kwargs: Any = None,
    **options: Any,
):  # fmt: skip
    """Metrics of each step and of evaluations, and the weights after two steps."""
    cls, config_cls = trainer_of(trainer), trainer_of(trainer.removeprefix("Liger").replace("Trainer", "Config"))
    if model is None:  # from a folder, as TRL makes the reference of it
        make("llama", vocab_size=64).save_pretrained(folder / "model")
        model = LlamaForCausalLM.from_pretrained(folder / "model").to(DEVICE)
    common = dict(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1)
    common |= dict(save_strategy="no", report_to=[], seed=1, disable_tqdm=True, learning_rate=0.1, optim="sgd")
    common |= dict(use_cpu=DEVICE == "cpu", bf16=False, gradient_checkpointing=False)
    flag = {n for n in ("use_liger_loss", "use_liger_kernel") if n in inspect.signature(config_cls).parameters}
    args = config_cls(str(folder), **dict.fromkeys(flag, use), **(common | options))
    torch.manual_seed(3)
    more = (trainer_kwargs or dict)()
    made = cls(model=model, args=args, train_dataset=rows(kind), processing_class=tokenizer(), **more)
    with heads_that_run() if use and IN_TABLE else contextlib.nullcontext() as made.heads:
        made.train()
    skip = re.compile("runtime|per_second|epoch|learning_rate|time|flos")
    kept = lambda k, v: isinstance(v, (int, float)) and not skip.search(k)
    logs = [{k: v for k, v in e.items() if kept(k, v)} for e in made.state.log_history]
    return made, logs, {n: p.detach() for n, p in model.state_dict().items()}


def trainer_of(name: str) -> Any:
    if name == "LigerORPOTrainer":
        return importlib.import_module("liger_kernel.transformers.trainer").LigerORPOTrainer
    if hasattr(trl, name):
        return getattr(trl, name)
    module = name.removesuffix("Trainer").removesuffix("Config").lower().replace("linedpo", "line_dpo")
    return getattr(pytest.importorskip(f"trl.experimental.{module}", reason=f"trl {VERSION} has no {name}"), name)


def assert_same(ours: tuple, stock: tuple, differ: tuple[str, ...] = (), listed: bool = True) -> None:
    """``listed``: the guide's table has the row of these trainers."""
    (_, logs, weights), (_, expected, expected_weights) = ours, stock
    assert len(logs) == len(expected) > 2
    common = [{k: e[k] for k in e if k in o and k not in differ} for o, e in zip(logs, expected)]
    assert all(any(name.endswith("loss") for name in e) for e in common)
    torch.testing.assert_close([{k: o[k] for k in e} for o, e in zip(logs, common)], common, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=2e-5)

    if listed and isinstance(getattr(ours[0], "heads", None), set):
        in_the_table(ours, stock)


# -- the table of trainers -----------------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trl.md"
IN_TABLE = VERSION.release[:2] == (1, 16) and DEVICE == "cpu"


@contextlib.contextmanager
def heads_that_run() -> Iterator[set[str]]:
    """Names of the heads that compute losses meanwhile: our operators, and TRL's Functions. By the
    code that runs, as nothing else sees every way to them."""
    known: dict[CodeType, str | None] = {}
    found: set[str] = set()

    def name_of(code: CodeType) -> str | None:
        *folder, file = Path(code.co_filename).parts
        if "liger_kernel" in folder and "losses" in folder and file == f"{code.co_name}.py":
            return f"`{code.co_name}`"
        return "TRL's" if folder[-2:] == ["trl", "kernels"] and code.co_name == "forward" else None

    def called(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = name_of(code)
            if known[code]:
                found.add(known[code])

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def in_the_table(ours: tuple, stock: tuple) -> None:
    made, args = ours[0], ours[0].args
    losses, expected = ([e["loss"] for e in logs if "loss" in e] for _, logs, _ in (ours, stock))
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    settings = [t for t in [getattr(args, "loss_type", None)] if t in ("dft", "simpo")]
    settings += [s for s, flag in (("packed", "packing"), ("weighted", "use_weighting")) if getattr(args, flag, False)]
    adapters = getattr(made.model, "peft_config", {}).values()
    settings += [c.peft_type.value.lower().replace("_", " ").replace("lora", "LoRA") for c in adapters]
    logits = "a score" if hasattr(made.model, "score") else "logits"
    check_row(f"`{type(made).__name__}`{''.join(f', {s}' for s in settings)}", made.heads or {logits})


def check_row(trainer: str, heads: set[str]) -> None:
    row, text = f"| {trainer} | {', '.join(sorted(heads))} |\n", GUIDE.read_text()
    if row in text:
        return
    if os.environ.get("LIGER_WRITE") != "1":
        pytest.fail(f"{GUIDE.name} must have this row (LIGER_WRITE=1 writes it): {row}")
    header = "| trainer, flag on | head that ran |\n|---|---|\n"
    before, after = text.split(header)
    table, _, rest = after.partition("\n\n")
    others = [line for line in f"{table}\n".splitlines(True) if not line.startswith(f"| {trainer} |")]
    GUIDE.write_text(before + header + "".join(sorted([*others, row])) + "\n" + rest)


def with_lora(*modules: str, **more: Any) -> dict[str, Any]:
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
    return {"peft_config": peft.LoraConfig(r=2, target_modules=[*modules], task_type="CAUSAL_LM", **more)}


def prompt_length(trainer: str) -> dict[str, int]:
    """As short as the rows, where TRL still asks for it."""
    known = inspect.signature(trainer_of(trainer.replace("Trainer", "Config"))).parameters
    return {"max_prompt_length": 24} if "max_prompt_length" in known else {}


def kind_of(trainer: str) -> str:
    return "unpaired" if trainer == "KTOTrainer" else "pairs"


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
TEACHER = lambda: {"teacher_model": make("llama", seed=7, vocab_size=64)}
TAUGHT = dict(trainer_kwargs=TEACHER, lmbda=0.0, max_length=64)

# -- with the flag and without -------------------------------------------------------------

# losses of mean log-probabilities return these; TRL's own path logs sums all the same
PER_TOKEN = ("logps/chosen", "logps/rejected")
PER_TOKEN += ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
# With the flag TRL divides sums over tokens and vocabulary by the number of sequences; without, it
# takes means since 1.1.
MEANS = "logits/chosen", "logits/rejected"


def case(trainer: str, kind: str, versions: str = "", refused: str = "", differ: tuple[str, ...] = (),
         ci: bool = False, **options: Any) -> Any:  # fmt: skip
    """A parameter: ``versions`` of TRL that can do this with the flag; what those before 1.13 say where
    they refuse it, and metrics that are others there; ``ci``: .ci/run takes it as well."""
    marks = [pytest.mark.smoke] * ci
    return pytest.param(trainer, kind, options, versions, refused, differ, marks=marks, id=f"{trainer}-{options}")


def dpo(loss_type: str, versions: str = ">=0.26", **more: Any) -> Any:
    return case("DPOTrainer", "pairs", versions, loss_type=[loss_type], **more)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("a") + 0.1 * len(set(text)) for text in completions]


SAMPLES = dict(num_generations=4, max_completion_length=6, trainer_kwargs=lambda: {"reward_funcs": reward})


def grpo(versions: str = "", **more: Any) -> Any:
    how = dict(per_device_train_batch_size=4, num_iterations=2, max_steps=3, temperature=0.9)
    return case("GRPOTrainer", "prompts", versions, **SAMPLES | how | more)


EVALUATES = EVALUATED | {"trainer_kwargs": lambda: {"eval_dataset": rows("text")}}
ON_THE_HEAD = {"trainer_kwargs": lambda: with_lora("q_proj", "lm_head", init_lora_weights=False)}
ADAPTED = {"trainer_kwargs": lambda: with_lora("q_proj", "v_proj")}
OLD = "<1.13"  # test_trainers_that_read_logits and test_which_head_runs have later ones
SHORT = dict(max_length=48, max_prompt_length=24)
COMPARED = [
    case("SFTTrainer", "text", ci=True),
    case("SFTTrainer", "text", packing=True, packing_strategy="wrapped", max_length=16),
    case("SFTTrainer", "chat", ci=True, assistant_only_loss=True),
    case("SFTTrainer", "chat", loss_type="dft"),
    case("SFTTrainer", "text", **EVALUATES),
    case("SFTTrainer", "text", liger_kernel_config={"unpad": True}, gradient_checkpointing=True),
    # later versions refuse adapters of the head; the default loss does not know such heads
    case("SFTTrainer", "text", OLD, loss_type="nll", **ON_THE_HEAD),
    *(dpo(loss_type, "") for loss_type in ("apo_zero", "apo_down", "sppo_hard", "nca_pair")),
    *(dpo(t) for t in ("hinge", "robust", "bco_pair", "aot", "aot_unpaired", "discopop", "sft")),
    dpo("sigmoid", "", ci=True),
    dpo("sigmoid_norm", ">=1.1", differ=PER_TOKEN, ci=True),
    dpo("ipo", differ=PER_TOKEN),
    dpo("exo_pair", refused="label_smoothing must be in", label_smoothing=1e-3),  # they do not pass it on
    case("DPOTrainer", "pairs", ">=1.13", use_weighting=True),
    case("DPOTrainer", "pairs", ">=0.26", refused="precomput", precompute_ref_log_probs=True),
    case("DPOTrainer", "pairs", "!=0.26.*,!=0.27.*,!=0.28.*,!=0.29.*,!=1.0.*", differ=MEANS, **ADAPTED),
    case("KTOTrainer", "unpaired", ">=1.13", **ADAPTED),
    case("KTOTrainer", "unpaired", differ=MEANS),
    case("KTOTrainer", "unpaired", differ=MEANS, ci=True, beta=0.5),
    case("KTOTrainer", "unpaired", refused="Only KTO loss", loss_type="apo_zero_unpaired"),
    # TRL has no fused path for these; layers and norms are ours
    case("ORPOTrainer", "pairs", OLD, **SHORT),
    case("CPOTrainer", "pairs", OLD, ci=True, **SHORT),
    case("CPOTrainer", "pairs", OLD, loss_type="simpo", cpo_alpha=0.0, **SHORT),
    case("RLOOTrainer", "prompts", OLD, ci=True, **SAMPLES),
    *(grpo(loss_type=loss, beta=b) for loss in ("grpo", "bnpo", "dr_grpo") for b in (0.0, 0.04)),
    *(grpo(">=1.0", loss_type=loss, beta=b) for loss in ("cispo", "sapo", "luspo", "vespo") for b in (0.0, 0.04)),
    grpo(loss_type="dapo", beta=0.0),
    grpo(loss_type="dapo", beta=0.04, ci=True),
    grpo(importance_sampling_level="sequence"),
    grpo(">=1.0", importance_sampling_level="sequence", loss_type="luspo"),
    grpo(delta=1.5, beta=0.04),
    grpo(epsilon=0.01, epsilon_high=0.02),
    grpo(">=1.4", use_bias_correction_kl=True, beta=0.1),  # older ones do not pass it on
    grpo(">=1.11", mask_truncated_completions=True),  # nor the tokens of all micro-batches
    grpo(scale_rewards="batch"),
    grpo(top_entropy_quantile=0.5),
    grpo(entropy_coef=0.1),
    grpo(off_policy_mask_threshold=0.5, beta=0.04),
    # the adapter learns as without the flag, or TRL refuses: it is not left out in silence
    grpo(OLD, trainer_kwargs=lambda: ON_THE_HEAD["trainer_kwargs"]() | {"reward_funcs": reward}),
    # with the flag, older ones add half of the cross entropy: both weights are its defaults
    *(case("GKDTrainer", "chat", ">=1.4", ci=b == 0.3, beta=b, max_new_tokens=4, **TAUGHT) for b in (0.0, 0.3, 1.0)),
]


@pytest.mark.parametrize("trainer, kind, options, versions, refused, differ", COMPARED)
def test_as_without_the_flag(tmp_path, trainer, kind, options, versions, refused, differ):
    if not SpecifierSet(versions, prereleases=True).contains(VERSION):
        pytest.skip(f"trl {VERSION}: of {versions}")
    known = {"trainer_kwargs", *inspect.signature(trainer_of(trainer.replace("Trainer", "Config"))).parameters}
    options = {name: value for name, value in options.items() if name in known or name != "max_prompt_length"}
    if unknown := options.keys() - known:
        pytest.skip(f"trl {VERSION} has no {', '.join(unknown)}")
    if refused and FUSED:
        with pytest.raises(ValueError, match=refused):
            taught(tmp_path, trainer, kind, True, **options)
        return
    try:
        ours = taught(tmp_path / "ours", trainer, kind, True, **options)
    except (ValueError, NotImplementedError) as error:
        if trainer == "GRPOTrainer" and FUSED and "iger" in str(error) and "LigerFused" not in str(error):
            pytest.skip(f"trl {VERSION} refuses this with the flag: {error}")
        raise
    stock = taught(tmp_path / "stock", trainer, kind, False, **options)
    assert_same(ours, stock, differ if FUSED else ())
    assert trainer != "SFTTrainer" or "mean_token_accuracy" in ours[1][0] or Version("0.26") > VERSION


@pytest.mark.parametrize("center", [None, smoke(0.1)])
def test_reward(tmp_path, center):
    from transformers import LlamaForSequenceClassification

    def run(use: bool) -> tuple:
        config = make("llama", vocab_size=64).config
        config.num_labels, config.pad_token_id = 1, 0
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config).to(DEVICE)
        return taught(tmp_path / str(use), "RewardTrainer", "pairs", use, model, center_rewards_coefficient=center)

    assert_same(run(True), run(False))


# -- preferences ---------------------------------------------------------------------------


@pytest.mark.skipif(Version("1.16") > VERSION, reason="TRL refuses them with the flag, or computes them later")
@pytest.mark.parametrize("reference", ["policy", smoke("given"), "adapters"])
@pytest.mark.parametrize("trainer", ["DPOTrainer", smoke("KTOTrainer")])
def test_references_computed_before_are_those_of_the_patched_model(tmp_path, monkeypatch, trainer, reference):
    """Also where those of the stock model are cached: here, these are wrong."""
    cls, kind = trainer_of(trainer), kind_of(trainer)
    compute, calls = cls.compute_ref_log_probs, []

    def spy(self, model, inputs):
        calls.append(patched(model))
        return tuple(t if t is None or calls[-1] else t + 1 for t in compute(self, model, inputs))

    monkeypatch.setattr(cls, "compute_ref_log_probs", spy)

    def more() -> dict:
        given = {"eval_dataset": {"some": rows(kind)}}
        if reference == "given":
            given["ref_model"] = LlamaForCausalLM.from_pretrained(folder / "model").to(DEVICE)
        elif reference == "adapters":
            given |= with_lora("q_proj", "v_proj")
        return given

    for use in (False, True):
        folder = tmp_path / str(use)
        trained, logs, _ = taught(folder, trainer, kind, use, trainer_kwargs=more, precompute_ref_log_probs=True)
        assert (logs[0]["rewards/chosen"] == 0) == use
    seen = len(calls)
    assert True in calls and trained.evaluate()["eval_some_loss"] > 0
    trained.train()
    assert len(calls) == seen  # what was trained is no reference


def test_a_reference_that_is_gone_is_refused():
    from types import SimpleNamespace

    from liger_kernel.transformers.patching.apply import compute_references_again

    data, args = datasets.Dataset.from_dict({"ref_chosen_logps": [0.0]}), SimpleNamespace(precompute_ref_log_probs=True)
    more = dict(is_fsdp_enabled=True, _precompute_model_hash="a")
    trainer = SimpleNamespace(args=args, train_dataset=data, ref_model=None, model=nn.Linear(1, 1), **more)
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs must be False .* or pass ref_model="):
        compute_references_again(trainer, {})


patched = lambda model: any(map(is_patched, model.modules()))


@pytest.mark.parametrize("trainer", ["DPOTrainer", "KTOTrainer", "LigerORPOTrainer"])
def test_virtual_tokens(tmp_path, trainer):
    """Of prompt tuning: what the flag computes without logits is refused, or equal."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
    make_config = lambda: {"peft_config": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")}
    run = lambda name, use: taught(tmp_path / name, name, kind_of(trainer), use, trainer_kwargs=make_config)
    try:
        stock = run(trainer.removeprefix("Liger"), False)
    except (ValueError, RuntimeError, TypeError):
        stock = None  # TRL refuses these with the flag and without
    if stock is None or (FUSED and trainer != "LigerORPOTrainer"):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            run(trainer, True)
    else:
        assert_same(run(trainer, True), stock, MEANS)


@pytest.mark.parametrize("trainer", [smoke("DPOTrainer"), "KTOTrainer"])
def test_the_reference_rounds_as_the_policy(tmp_path, trainer):
    """With the flag both are patched, without it none, and no other model is."""
    bystander = make("llama", vocab_size=64)
    for use in (True, False):
        trained, logs, _ = taught(tmp_path / str(use), trainer, kind_of(trainer), use)
        assert patched(trained.ref_model) == patched(trained.model) == use and not patched(bystander)
        if trainer == "DPOTrainer":
            assert logs[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)


def orpo(tmp_path: Path, ours: bool, model: Any = None, flag: bool = False, **options: Any) -> tuple:
    name = "LigerORPOTrainer" if ours else "ORPOTrainer"
    options = {"max_length": 48} | prompt_length("ORPOTrainer") | options
    return taught(tmp_path / str(ours), name, "pairs", flag, model and model(), **options)


WRAPPED = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
FSDP2 = {"fsdp": "full_shard", "fsdp_config": WRAPPED}
ORPO_FAMILIES = ["llama", "recurrent_gemma", "falcon_h1", "xlstm", "modernbert-decoder", "gemma2", "mixtral"]


@pytest.mark.parametrize("model_type", [smoke(family) if family == "gemma2" else family for family in ORPO_FAMILIES])
def test_our_orpo_trainer(tmp_path, monkeypatch, model_type):
    """Losses and metrics without logits are TRL's, whatever a family does to its logits."""
    more = {"pad_token_id": 0} if model_type == "modernbert-decoder" else {}
    model = lambda: make(model_type, vocab_size=64, **more)
    stock = orpo(tmp_path, False, model)
    monkeypatch.setattr(DeferredLogits, "value", None)  # logits are not computed
    assert_same(orpo(tmp_path, True, model), stock)


def adapted(head: bool = False) -> nn.Module:
    import peft

    modules = ["q_proj", "v_proj", *(["lm_head"] if head else [])]
    torch.manual_seed(0)
    config = with_lora(*modules, init_lora_weights=False)["peft_config"]
    return peft.get_peft_model(make("llama", vocab_size=64), config)


@pytest.mark.parametrize(
    "model, options",
    [
        (adapted, {}),
        smoke(lambda: adapted(head=True), {}),
        (None, {"gradient_checkpointing": True}),
        (None, {"flag": True}),
        (lambda: make("qwen3_moe", vocab_size=64, output_router_logits=True), {}),
        (None, EVALUATED | {"trainer_kwargs": lambda: {"eval_dataset": rows("pairs")}}),
    ],
    ids=["peft", "peft of the head", "checkpointing", "patched", "auxiliary loss", "evaluated"],
)
def test_our_orpo_trainer_with(tmp_path, model, options):
    ours, stock = (
        orpo(tmp_path, which, model, **(options | {"flag": which and "flag" in options})) for which in (True, False)
    )
    assert_same(ours, stock)
    assert any("eval_logits/chosen" in entry for entry in ours[1]) == ("eval_steps" in options)


def test_our_orpo_trainer_under_autocast(tmp_path):
    """In bf16, as TRL's: not farther from fp32 than that."""
    truth, stock = (orpo(tmp_path, False, bf16=bf16) for bf16 in (False, True))
    ours = orpo(tmp_path, True, bf16=True)
    for entry, theirs, true in zip(ours[1][:2], stock[1][:2], truth[1][:2]):
        for name in ("nll_loss", "logps/chosen", "logps/rejected"):
            ours_off, theirs_off = (abs(e[name] - true[name]) for e in (entry, theirs))
            assert 0 < ours_off <= max(2 * theirs_off, 2**-8 * abs(true[name])), name


def _rank(rank: int, folder: Path, port: int, ours: bool, options: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    recipes = recipes_of_heads()
    with served_by_kernels_or_references():
        _, logs, weights = orpo(folder / str(rank), ours, lambda: make("llama", vocab_size=64), **options)
    whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}
    torch.save((len(recipes), logs, whole), folder / f"{rank}.pt")


def recipes_of_heads(patch: Any = setattr) -> list[Any]:
    """What heads of patched models return from now on instead of logits."""
    from liger_kernel.transformers.head import stand_in

    made, deferred = [], stand_in.deferred
    patch(stand_in, "deferred", lambda *args: made.append(deferred(*args)) or made[-1])
    return made


def on_two_ranks(folder: Path, ours: bool, **options: Any) -> tuple:
    """Recipes for logits and logs of the first of two ranks, and the weights, equal on both."""
    folder.mkdir()
    processes.start_ranks(_rank, (folder, processes.free_port(), ours, options), 2)
    (recipes, logs, weights), (*_, others) = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(others, weights, rtol=0, atol=0)
    return recipes, logs, weights


@pytest.mark.parametrize("options", [{}, FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.skipif(DEVICE != "cpu", reason="ranks share a GPU")
def test_our_orpo_trainer_on_two_ranks(tmp_path, options):
    """The same weights on both, which are those of TRL's trainer: gradients are reduced."""
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3}
    options |= {"ddp_backend": "gloo"}
    assert_same(on_two_ranks(tmp_path / "ours", True, **options), on_two_ranks(tmp_path / "stock", False, **options))


# -- which head runs -------------------------------------------------------------------------

GENERATES = dict(max_completion_length=6)
HEADS = [
    ("SFTTrainer", "text", {}),
    ("DPOTrainer", "pairs", {}),
    ("KTOTrainer", "unpaired", {}),
    ("GRPOTrainer", "prompts", SAMPLES | dict(beta=0.04)),
    ("RLOOTrainer", "prompts", SAMPLES | dict(beta=0.04)),
    *(("DistillationTrainer", "prompts", GENERATES | dict(beta=b, trainer_kwargs=TEACHER)) for b in (0.0, 0.5, 1.0)),
    ("DistillationTrainer", "prompts", GENERATES | dict(trainer_kwargs=lambda: TEACHER() | with_lora("q_proj"))),
]


@pytest.mark.parametrize(
    "trainer, kind, options", [*HEADS[:3], smoke(*HEADS[3]), *HEADS[4:6], smoke(*HEADS[6]), *HEADS[7:]]
)
def test_which_head_runs(tmp_path, monkeypatch, trainer, kind, options):
    """Ours with the flag, TRL's own without it or ``fused_logprobs``; the losses are the same."""
    from liger_kernel.transformers import restore, trl_head

    first = "1.14" if trainer in ("DPOTrainer", "KTOTrainer", "GRPOTrainer") else "1.15"
    if Version(first) > VERSION:
        pytest.skip(f"{trainer} has a head that we know from trl {first} on")
    name = "divergence" if trainer == "DistillationTrainer" else "logprobs"
    theirs = trl_head._FUNCTIONS[name == "divergence"]
    calls = calls_of(monkeypatch, trl_head, f"linear_{name}")
    runs, counts = [], []
    for use, more in ((False, {}), (True, {"fused_logprobs": False}), (True, {})):
        calls.clear()
        config = {"liger_kernel_config": more} if use else {}
        runs.append(taught(tmp_path / str(len(runs)), trainer, kind, use, **(options | config)))
        counts.append(len(calls))
        restore()  # the reference, too
        assert "apply" not in vars(theirs.find())
    losses = [[e["loss"] for e in logs if "loss" in e] for _, logs, _ in runs]
    assert len(losses[0]) == 2 and counts[:2] == [0, 0] and counts[2] >= 4  # two steps of two batches
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5, abs=1e-6)] * 2
    if IN_TABLE:
        assert runs[1][0].heads == {"TRL's"}
        in_the_table(runs[2], runs[0])


def test_the_head_of_asynchronous_grpo():
    """Its trainer refuses the flag: patched by hand, this is the head that it gives to models."""
    if Version("1.15") > VERSION:
        pytest.skip("known from trl 1.15 on")
    from trl.trainer.utils import add_fused_lm_head

    from liger_kernel.transformers import apply_liger_kernel_to_llama, restore

    model, ids = make("llama", vocab_size=64), torch.arange(24, device=DEVICE).view(2, 12) % 50
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    run = lambda: model(input_ids=ids, labels=ids, fused_lm_head=True)
    expected = run()
    apply_liger_kernel_to_llama(model=model)
    with heads_that_run() as heads:
        found = run()
    restore(model)
    torch.testing.assert_close((found.log_probs, found.entropy), (expected.log_probs, expected.entropy))
    assert heads == {"`linear_logprobs`"}
    if IN_TABLE:
        check_row("`AsyncGRPOTrainer`, patched by hand", heads)


# -- trainers that read logits ---------------------------------------------------------------

SOME_RIGHT = lambda: {"reward_funcs": lambda completions, **_: [float(i % 2) for i, _ in enumerate(completions)]}
READ = [
    ("ORPOTrainer", "pairs", {}),
    ("CPOTrainer", "pairs", {}),
    ("CPOTrainer", "pairs", {"loss_type": "simpo", "cpo_alpha": 0.0, "gradient_checkpointing": True}),
    ("TPOTrainer", "triples", {}),
    ("OnlineDPOTrainer", "prompts", {"max_new_tokens": 6, "trainer_kwargs": lambda: {"reward_funcs": reward}}),
    ("A2POTrainer", "prompts", GENERATES | {"trainer_kwargs": SOME_RIGHT}),
    ("SDPOTrainer", "prompts", SAMPLES | {"success_reward_threshold": 0.2}),
    ("SDPOTrainer", "prompts", SAMPLES | {"distillation_weight": 0.0, "temperature": 0.7}),
    ("GKDTrainer", "chat", TAUGHT | {"max_new_tokens": 6}),
    ("GOLDTrainer", "chat", TAUGHT | GENERATES | {"use_uld_loss": False, "temperature": 0.7}),
]


@pytest.mark.parametrize("trainer, kind, options", [*READ[:3], smoke(*READ[3]), *READ[4:8], smoke(*READ[8]), READ[9]])
def test_trainers_that_read_logits(tmp_path, monkeypatch, trainer, kind, options):
    """With the flag, no logits of a batch are computed; losses, metrics and weights are the same."""
    if Version("1.14") > VERSION:
        pytest.skip("known from trl 1.14 on")
    from liger_kernel.transformers import restore

    stock = taught(tmp_path / "stock", trainer, kind, False, **options)
    made = recipes_of_heads(monkeypatch.setattr)
    monkeypatch.setattr(DeferredLogits, "value", None)
    assert_same(taught(tmp_path / "ours", trainer, kind, True, **options), stock)
    restore()
    assert len(made) >= 4 and all(isinstance(recipe, DeferredLogits) for recipe in made)  # two steps of two batches


@pytest.mark.parametrize(
    "options, recipes", [({"gradient_checkpointing": True}, 3), (FSDP2, 0), ({}, 0)], ids=["ddp", "fsdp2", "unused"]
)
@pytest.mark.skipif(DEVICE != "cpu", reason="ranks share a GPU")
def test_trainers_that_read_logits_on_two_ranks(tmp_path, options, recipes):
    """With DDP, unless it looks for unused parameters in the graph of the logits; not with FSDP."""
    if Version("1.14") > VERSION:
        pytest.skip("known from trl 1.14 on")
    options |= dict(per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=3, ddp_backend="gloo")
    ours, stock = (on_two_ranks(tmp_path / str(flag), False, flag=flag, **options) for flag in (True, False))
    assert_same(ours, stock)
    assert (ours[0], stock[0]) == (recipes, 0)


# -- recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_recipes_are_files_of_trls_command_line(kind):
    import dataclasses

    import liger_kernel
    from liger_kernel.train.config import read_file

    (path,) = (Path(liger_kernel.__file__).parent / "recipes").glob(f"trl-{kind}-*.yaml")
    classes = [trainer_of(f"{kind.upper()}Config"), trl.ScriptArguments, trl.ModelConfig]
    known = {field.name for cls in classes for field in dataclasses.fields(cls)} | {"reward_funcs"}
    assert read_file(path).keys() <= known
