"""What follows a run: its last lines and its card, `liger chat`, `liger merge` and
`liger bench step` on rows of the user's."""

import contextlib
import importlib.util
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import huggingface_hub
import peft
import transformers
from fp8_checkpoints import publish, stays_in_fp8
from hf_models import served_by_kernels_or_references
from packed_checkpoints import publish_as, publish_mxfp4
from safetensors.torch import load_file, save_file
from small_runs import STEPS, needs, refused, save_model, write_jsonl

from liger_kernel import cli
from liger_kernel.train import adapters, card, demo, merge, stored
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.tokenise import train_bpe
from liger_kernel.train.trained import load_model

WORDS = ["red", "green", "blue", "one", "two", "three"]
CHATS = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} {w}"}] for w in WORDS] * 4
FLAGS = ["--tokens", "6", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a base in bf16, chats, and the adapters of a run; what the run has said."""
    folder = tmp_path_factory.mktemp("after")
    tokenizer = train_bpe([turn["content"] for chat in CHATS for turn in chat] + ["### User:\n### Assistant:"], 300)
    save_model(folder / "base", tokenizer, dtype="bfloat16", num_key_value_heads=2, initializer_range=0.3)
    data = write_jsonl(folder / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    places = dict(model=folder / "base", data=data, out=folder / "run", save=folder / "tuned", lora=4, device="cpu")
    argv = [part for name, value in (STEPS | places).items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()) as said, served_by_kernels_or_references():
        assert cli.main(["train", *argv]) == 0
    return SimpleNamespace(folder=folder, said=said.getvalue())


@pytest.fixture
def here(run, monkeypatch):
    monkeypatch.chdir(run.folder)
    return run.folder


def stock(name):
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype="auto")
    return peft.PeftModel.from_pretrained(base, name).eval() if name != "base" else base.eval()


def answer(model, *turns):
    """The likeliest answer, as transformers makes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    given = tokenizer.apply_chat_template(
        list(turns), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**given, do_sample=False, max_new_tokens=6)
    return tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


def test_a_run_says_what_to_type_next_and_leaves_a_card(run, here):
    folder = run.folder
    assert run.said.endswith(
        f"adapters in {folder}/tuned\n  next: liger chat {folder}/tuned --beside {folder}/base\n"
        f"  next: liger merge {folder}/tuned --out {folder}/tuned-merged\n"
    )
    text = Path("tuned/README.md").read_text()
    losses = json.loads(Path("run/metrics.json").read_text())["losses"]
    for said in (
        *("library_name: peft", "Adapters of base.", "| data | chats.jsonl |", "| 3 of 4 rows of at most 24 tokens |"),
        *("LoRA, rank 4, alpha 8, on all-linear", f"| loss | {losses[0]:.4f} at first, {losses[-1]:.4f} at last"),
    ):
        assert said in text
    assert str(folder) not in text and "More Information" not in text
    assert huggingface_hub.ModelCard(text).data.tags == ["liger-kernel"]
    if importlib.util.find_spec("matplotlib"):
        assert "](loss.png)" in text and Path("tuned/loss.png").read_bytes().startswith(b"\x89PNG")
    # sizes of a model from random weights are no part of a run that has a model
    recorded = json.loads(Path("run/liger-run.json").read_text())
    assert recorded["model"] and not recorded.keys() & {"hidden", "layers", "heads", "vocab"}


def test_a_card_that_somebody_has_written_stays_and_no_card_ends_a_run(tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    config = TrainConfig(save=str(tmp_path), model="org/base", quantize="nf4", lora=2, trainer="hf")
    metrics = dict(losses=[3.0, 2.0], ranks=1, evaluations=[], device="x", precision="fp32")
    card.finish(config, metrics)
    assert (tmp_path / "README.md").read_text() == "mine"
    out = capsys.readouterr().out
    assert f"liger merge {tmp_path} --out {tmp_path}-merged --quantize nf4\n" in out
    (tmp_path / "README.md").unlink()
    card.finish(config, metrics)
    text = (tmp_path / "README.md").read_text()
    assert "base_model: org/base" in text and "Adapters of org/base." in text and ", base in nf4 |" in text
    card.finish(config, {})
    assert "no model card: 'losses'" in capsys.readouterr().err
    card.finish(TrainConfig(), metrics)
    assert capsys.readouterr().out == "the model is not saved: --save FOLDER saves it\n"


@pytest.mark.parametrize("file", ["prompts.txt", "prompts.jsonl"])
def test_prompts_are_answered_beside_the_base(file, here, capsys):
    Path("prompts.txt").write_text("say red\n\nsay two\n")
    write_jsonl(Path("prompts.jsonl"), [{"messages": CHATS[0]}, {"instruction": "say two", "output": "x"}])
    assert cli.main(["chat", "tuned", "--beside", "base", "--prompts", file, *FLAGS]) == 0
    base, tuned = stock("base"), stock("tuned")
    expected = "".join(
        f"> {said}\n[base]\n{answer(base, user(said))}\n[tuned]\n{answer(tuned, user(said))}\n\n"
        for said in ("say red", "say two")
    )
    assert capsys.readouterr().out == expected and answer(base, user("say red")) != answer(tuned, user("say red"))
    write_jsonl(Path("wrong.jsonl"), [{"text": "x"}])
    assert cli.main(["chat", "tuned", "--prompts", "wrong.jsonl", *FLAGS]) == 2
    assert "wrong.jsonl: record 1 has no question, but ['text']" in capsys.readouterr().err


def test_a_conversation_goes_on_until_a_new_one(here, capsys, monkeypatch):
    typed = mock.Mock(side_effect=["say red", " ", "say two", "/new", "say two", EOFError])
    monkeypatch.setattr("builtins.input", typed)
    assert cli.main(["chat", "tuned", *FLAGS]) == 0
    model = stock("tuned")
    first = answer(model, user("say red"))
    turns = (user("say red"), {"role": "assistant", "content": first}, user("say two"))
    expected = [first, answer(model, *turns), "", answer(model, user("say two"))]
    assert capsys.readouterr().out == "".join(f"{text}\n" + "\n" * bool(text) for text in expected)


def hub(monkeypatch, refuses=""):
    """What a hub is asked, which may refuse an account or a repository."""
    asked = []

    def asks(name):
        def ask(self, *args, **how):
            if name == refuses:
                raise huggingface_hub.errors.HFValidationError("no: read this")
            asked.append((name, *args, {**how, "folder_path": sorted(os.listdir(how.get("folder_path", ".")))}))
            return "URL"

        monkeypatch.setattr(huggingface_hub.HfApi, name, ask)

    for name in ("whoami", "create_repo", "upload_folder"):
        asks(name)
    return asked


def test_a_merge_is_the_model_with_its_adapters(here, tmp_path, capsys, monkeypatch):
    asked, out = hub(monkeypatch), tmp_path / "merged"
    assert cli.main(["merge", "tuned", "--out", str(out), "--push", "me/new"]) == 0
    said = capsys.readouterr().out
    assert "largest difference of logits by the merge: " in said and f"next: vllm serve {out}\n" in said
    (_, *_), (_, made, how), (_, sent) = asked
    assert made == sent["repo_id"] == "me/new" and how["private"] and "\npushed: URL\n" in said
    assert sent["folder_path"] == sorted(os.listdir(out)) and "chat_template.jinja" in os.listdir(out)
    model, ids = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto"), torch.arange(20)[None]
    assert model.dtype == torch.bfloat16
    merged, tuned, base = (m(input_ids=ids).logits.float() for m in (model, stock("tuned"), stock("base")))
    assert (merged - tuned).norm() < 0.05 * tuned.norm() and (merged - tuned).norm() < 0.5 * (tuned - base).norm()
    text = (out / "README.md").read_text()
    assert "\n# me/new\n" in text and "| data | chats.jsonl |" in text and "library_name: transformers" in text
    assert (out / "loss.png").exists() == Path("tuned/loss.png").exists()


def test_a_merge_that_is_not_right_writes_nothing(here, tmp_path, capsys, monkeypatch):
    argv = ["merge", "tuned", "--out", str(tmp_path / "merged")]
    hub(monkeypatch, refuses="whoami")
    assert cli.main([*argv, "--push", "me/new"]) == 2
    assert "liger merge: cannot push to me/new: no: read this\n" in capsys.readouterr().err
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", lambda self, **_: self.unload())
    assert cli.main(argv) == 2 and not os.listdir(tmp_path / "merged")
    assert capsys.readouterr().err.endswith("That is more than rounding, so nothing is written\n")
    base, adapted = torch.ones(8), torch.full((8,), 1.001)
    assert merge.compared(base, adapted, adapted * 1.001, torch.bfloat16)
    refused("more than rounding", merge.compared, base, adapted, adapted * float("nan"), torch.bfloat16)


def test_a_push_that_is_refused_leaves_the_model(here, tmp_path, capsys, monkeypatch):
    hub(monkeypatch, refuses="create_repo")
    assert cli.main(["merge", "tuned", "--out", str(tmp_path / "merged"), "--push", "me/old"]) == 2
    assert "merged, which is complete, to me/old: no: read this\n" in capsys.readouterr().err
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_a_base_that_cannot_be_made_dense_is_refused_by_name():
    model = SimpleNamespace(is_quantized=True, dtype=torch.bfloat16)
    model.dequantize = mock.Mock(side_effect=NotImplementedError("gptq has no implementation"))
    refused(r"base is quantised for good \(gptq .*: give --base the same model in 16 bits", merge.dense, model, "base")


@needs("bitsandbytes")
def test_a_merge_into_the_base_that_was_trained_on(here, tmp_path):
    """It is dense, in the dtype of the base's files, with the values of 4 bits."""
    assert cli.main(["merge", "tuned", "--out", str(tmp_path / "new"), "--quantize", "nf4"]) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "new").dtype == torch.bfloat16
    assert not hasattr(transformers.AutoConfig.from_pretrained(tmp_path / "new"), "quantization_config")


def with_its_tokenizer(here, folder):
    for file in (here / "base").glob("tokenizer*"):
        shutil.copy(file, folder)


def test_a_base_in_fp8(here, tmp_path, monkeypatch):
    """Adapters on it are drawn as on a dense one, and merged into it, decoded."""
    pytest.importorskip("transformers.integrations.finegrained_fp8")
    stays_in_fp8(monkeypatch)
    decoded = publish(stock("base"), tmp_path, (8, 16))
    with_its_tokenizer(here, tmp_path)
    config = TrainConfig(model=str(tmp_path), lora=4)
    stored = adapters.adapted(load_model(str(tmp_path), False, torch.device("cpu")), config)
    own = dict(adapters.adapted(decoded, config).named_parameters())
    drawn = {name: p for name, p in stored.named_parameters() if "lora_" in name}
    assert len(drawn) == 14 and all(torch.equal(p, own[name]) for name, p in drawn.items())
    for p in (p for name, p in drawn.items() if "lora_B" in name):
        p.data.fill_(0.1)
    stored.save_pretrained(tmp_path / "tuned")
    assert cli.main(["merge", str(tmp_path / "tuned"), "--out", str(tmp_path / "new")]) == 0
    new = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    weight = "model.layers.0.mlp.up_proj.weight"
    of = f"base_model.model.{weight.removesuffix('.weight')}"
    b, a = (drawn[f"{of}.lora_{name}.default.weight"] for name in "BA")
    expected = own[f"{of}.base_layer.weight"] + 2 * b @ a
    torch.testing.assert_close(new.get_parameter(weight), expected.bfloat16(), rtol=0.01, atol=0.001)


def adapted(model, folder):
    """Adapters on all projections that do something, saved; the model with them."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn_like(p) / 8
    model.base_model.model.name_or_path = str(folder)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(folder / "tuned")
    return model.eval()


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4", "gptq", "awq"])
def test_a_merge_into_the_storage_of_the_base(kind, here, tmp_path, capsys):
    """With the base's scales, by no package that made the base."""
    made = publish(stock("base"), tmp_path, (8, 16)) if kind == "fp8" else publish_as(stock("base"), tmp_path, kind)
    with_its_tokenizer(here, tmp_path)
    twin = adapted(made, tmp_path)
    argv = ["merge", str(tmp_path / "tuned"), "--out", str(tmp_path / "new"), "--to", "base"]
    whole = load_file(file := tmp_path / "tuned" / "adapter_model.safetensors")
    save_file(whole | {next(iter(whole)): torch.full_like(next(iter(whole.values())), float("nan"))}, file)
    assert cli.main(argv) == 2 and "has an adapter with numbers that are not finite" in capsys.readouterr().err
    save_file(whole, file)
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "largest difference of logits by the merge: 0 (0.0%, root mean" in said and "the numbers of" in said
    old, new = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "new"))
    changed = {name for name, t in new.items() if not torch.equal(t.view(torch.uint8), old[name].view(torch.uint8))}
    assert len(changed) == 7 and old.keys() == new.keys() and all(n.endswith(("weight", "_packed")) for n in changed)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "new")
    assert config.quantization_config == transformers.AutoConfig.from_pretrained(tmp_path).quantization_config
    values = stored.StoredWeights(tmp_path / "new", config).decoded(torch.float32)
    expected = twin.merge_and_unload().state_dict()
    off = {name: (values[name] - w).norm() / w.norm() for name, w in expected.items() if "proj" in name}
    assert values.keys() == expected.keys() and max(off.values()) < (0.05 if kind == "fp8" else 0.25)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_a_run_over_a_published_base(kind, here, tmp_path, capsys, monkeypatch):
    """liger train reads it as it is, merge-aware in FP8, and liger merge writes it again."""
    pytest.importorskip("transformers.core_model_loading", reason="this version has another loader")
    aware = ["--merge-aware"] if kind == "fp8" else ["--lora-targets", "q_proj,o_proj"]
    if kind == "fp8":
        stays_in_fp8(monkeypatch)
        publish(stock("base"), tmp_path, (8, 16))
    else:
        sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        form = transformers.GptOssConfig(
            num_hidden_layers=1, num_local_experts=4, vocab_size=stock("base").config.vocab_size, **sizes
        )
        publish_mxfp4(transformers.GptOssForCausalLM(form).bfloat16(), tmp_path)
    with_its_tokenizer(here, tmp_path)
    places = dict(model=tmp_path, data="chats.jsonl", out=tmp_path / "run", save=tmp_path / "t", lora=4, device="cpu")
    values = STEPS | dict(steps=2, precision="bf16-mixed") | places
    argv = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with served_by_kernels_or_references():
        assert cli.main(["train", *argv, *aware]) == 0
    tuned = load_file(tmp_path / "t" / "adapter_model.safetensors")
    assert len(tuned) == (14 if kind == "fp8" else 4) and all(t.abs().sum() > 0 for t in tuned.values())
    assert cli.main(["merge", str(tmp_path / "t"), "--out", str(tmp_path / "new"), "--to", "base"]) == 0
    assert f"the numbers of {kind} move the logits by" in capsys.readouterr().out
    old, new = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "new"))
    assert old.keys() == new.keys() and {n: t.dtype for n, t in old.items()} == {n: t.dtype for n, t in new.items()}


def numbers(losses, **more):
    return dict(losses=losses, rates=[100.0] * 6, tokens_per_second=100.0, peak_memory=2e9, precision="fp32") | more


def test_bench_step_on_own_rows(here, tmp_path, capsys, monkeypatch):
    runs = {"stock": numbers([4.0, 3.0]), "ours": numbers([4.0, 3.0], rates=[150.0] * 6, peak_memory=1e9)}
    codes = dict.fromkeys(runs, 0)

    def trained(config, out):
        for name, run in runs.items():
            (out / name).mkdir(exist_ok=True)
            more = dict(memory_before_training=0, parameters=1, device="x", memory_kind="y", model="llama")
            (out / name / "metrics.json").write_text(json.dumps(run | more))
            replace(config, kernels="off").save_to(out / f"{name}.json")
        return codes

    monkeypatch.setattr(demo, "_trained", trained)
    monkeypatch.setattr(demo, "plot", lambda *_: "")
    argv = ["bench", "step", "--model", "base", "--data", "chats.jsonl", "--length", "64", "--out", str(tmp_path / "b")]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert out.endswith(
        "On chats.jsonl, base trains with our kernels 1.50 times as fast as stock, in 0.50 times its peak memory "
        "(1.00 GB), and the losses differ by 0e+00, which is rounding.\n"
    )
    runs["stock"], runs["ours"] = numbers([4.0, 3.0], rates=[1.0]), numbers([4.0, 3.1])
    assert cli.main(argv) == 1  # in the same folder
    out = capsys.readouterr().out
    assert "at a speed that could not be compared" in out and "differ by 3e-02, which is MORE THAN rounding." in out
    codes["ours"] = 1
    assert cli.main(argv) == 1 and "the ours run failed with exit code 1; the two" in capsys.readouterr().err
