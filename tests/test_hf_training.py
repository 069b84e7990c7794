"""Training by others' loops: transformers' Trainer, TRL's SFTTrainer, PEFT's LoRA."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from modeling_looped import LoopedForCausalLM

CORE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT = "the loop runs again and the state goes round until the coda reads it out ."


@pytest.fixture
def arguments(tmp_path):
    """Function (**options) -> TrainingArguments of a quiet run on the CPU, plain SGD without clipping."""
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 0.1}
    return lambda **options: TrainingArguments(str(tmp_path / "run"), **{**quiet, **plain, **options})


@pytest.fixture
def rows(random_ids):
    """Rows with unequal numbers of counted labels."""
    rows = []
    for index, row in enumerate(random_ids(8, 12)):
        labels = row.clone()
        labels[: index % 5] = -100
        rows.append({"input_ids": row, "labels": labels})
    return rows


@pytest.fixture
def tokenizer():
    words = sorted(set(TEXT.split()))
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# B67
def test_trainer_learns_saves_and_resumes(variant_config, arguments, rows, tmp_path):
    options = {"learning_rate": 3e-3, "optim": "adamw_torch", "max_steps": 8, "per_device_train_batch_size": 4}
    torch.manual_seed(0)
    model = LoopedForCausalLM(variant_config(uniform_init_scale=0.5))
    options |= {"save_strategy": "steps", "save_steps": 4}
    trainer = Trainer(model, arguments(**options), train_dataset=rows)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]

    loaded, report = LoopedForCausalLM.from_pretrained(tmp_path / "run/checkpoint-8", output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())

    torch.manual_seed(1)
    again = LoopedForCausalLM(variant_config(uniform_init_scale=0.5))
    resumed = Trainer(again, arguments(**options), train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    assert losses(resumed)[-4:] == pytest.approx(losses(trainer)[-4:], abs=1e-6)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("skip_logits", [False, True])
def test_accumulation_equals_one_batch(tiny_config, make_model, arguments, rows, skip_logits):
    """Through num_items_in_batch: micro-batches with few counted labels weigh less."""
    weights = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = make_model(tiny_config())
        trainer = Trainer(
            model,
            arguments(max_steps=2, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation),
            train_dataset=rows,
            data_collator=lambda batch: {**default_data_collator(batch), "skip_logits": skip_logits},
        )
        trainer.train()
        weights.append(model.state_dict())
    before = make_model(tiny_config()).state_dict()
    for name, weight in weights[0].items():
        assert not torch.equal(weight, before[name]), name
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-6, msg=name)


# B69
def test_accumulated_gradient_is_clipped_once(tiny_config, make_model, arguments, rows):
    weights = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = make_model(tiny_config())
        options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        Trainer(model, arguments(max_steps=1, max_grad_norm=0.1, **options), train_dataset=rows).train()
        weights.append(model.state_dict())
    before = make_model(tiny_config()).state_dict()
    moved = torch.cat([(weight - before[name]).flatten() for name, weight in weights[0].items()])
    assert moved.norm().item() == pytest.approx(0.1 * 0.1, rel=1e-3)  # learning rate * clipped norm
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-7, msg=name)


# B71
def test_clipping_acts_on_the_gradient_of_the_step(tiny_config, make_model, arguments, rows):
    model = make_model(tiny_config())
    options = {"max_steps": 2, "learning_rate": 1.0, "max_grad_norm": 1e-9, "per_device_train_batch_size": 4}
    Trainer(model, arguments(**options), train_dataset=rows).train()
    for name, weight in make_model(tiny_config()).state_dict().items():
        assert (model.state_dict()[name] - weight).abs().max() <= 2e-9, name


# B61
def test_trainer_with_checkpointing_equals_without(tiny_config, make_model, arguments, rows):
    weights = []
    for checkpointing in (False, True):
        model = make_model(tiny_config(boundary_operator="norm_inject_learned"))
        Trainer(
            model,
            arguments(max_steps=2, gradient_checkpointing=checkpointing, per_device_train_batch_size=4),
            train_dataset=rows,
        ).train()
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-6, msg=name)


# B53
def test_compiled_trainer_run_reloads_and_resumes(tiny_config, make_model, arguments, rows, tmp_path):
    options = {"max_steps": 2, "torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "steps"}
    options |= {"save_steps": 1, "per_device_train_batch_size": 4}
    model = make_model(tiny_config())
    trainer = Trainer(model, arguments(**options), train_dataset=rows)
    trainer.train()
    folder = tmp_path / "run/checkpoint-2"
    assert not [name for name in load_file(folder / "model.safetensors") if "_orig_mod" in name]
    loaded, report = LoopedForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    again = make_model(tiny_config(), seed=1)
    resumed = Trainer(again, arguments(**options), train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert losses(resumed)[-1] == pytest.approx(losses(trainer)[-1], abs=1e-6)
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_evaluation_loss_is_the_loss_of_the_model(tiny_config, make_model, arguments, rows):
    model = make_model(tiny_config())
    trainer = Trainer(model, arguments(per_device_eval_batch_size=8), eval_dataset=rows)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(model(**batch).loss.item(), abs=1e-6)


# B67, B55
def test_sft_trainer_learns_to_stop(tiny_config, arguments, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(pad_token_id=0, eos_token_id=1, uniform_init_scale=0.5))
    seen = []

    class RecordLabels(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(next(iter(kwargs["train_dataloader"]))["labels"])

    dataset = Dataset.from_dict({"text": [TEXT, " ".join(TEXT.split()[:5])] * 8})
    config = trl.SFTConfig(
        str(tmp_path / "run"),
        max_steps=20,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = trl.SFTTrainer(
        model, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[RecordLabels()]
    )
    trainer.train()
    assert losses(trainer)[-1] < 0.5 * losses(trainer)[0]

    rows = [row[row != -100] for row in torch.cat([labels for labels in seen if labels.shape[1] > 6])]
    assert all(row[-1] == tokenizer.eos_token_id and (row == tokenizer.eos_token_id).sum() == 1 for row in rows)
    assert not any((row == tokenizer.pad_token_id).any() for row in rows)
    prompt = tokenizer(" ".join(TEXT.split()[:8]), return_tensors="pt").input_ids
    generated = model.eval().generate(prompt, max_new_tokens=20, do_sample=False)
    assert generated[0, -1] == tokenizer.eos_token_id


# B55: where pad = eos, labels must come from the attention mask, not from the token
def test_padding_that_is_eos_does_not_hide_true_ends():
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    batch = DataCollatorForLanguageModeling(pad_token_id=1)([{"input_ids": [5, 6, 7, 1]}, {"input_ids": [8, 1]}])
    assert batch["labels"].tolist() == [[5, 6, 7, 1], [8, 1, -100, -100]]


def draw_adapters(model):
    """Adapters start as zero updates; the tests need some."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


# B65, B47
@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("tie_core", [False, True])
def test_lora_on_the_blocks_merges_and_reloads(tiny_config, make_model, random_ids, tmp_path, tie_core, tied_head):
    peft = pytest.importorskip("peft")
    config = tiny_config(tie_core=tie_core, tie_word_embeddings=tied_head)
    ids = random_ids(2, 12)
    base = make_model(config)
    before = base(ids).logits
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=CORE, r=4)).eval()
    draw_adapters(model)
    with torch.no_grad():
        logits = model(ids).logits
        assert (logits - before).abs().max() > 0.1
        assert torch.equal(
            model.generate(ids, max_new_tokens=6, do_sample=False),
            model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False),
        )
        model.save_pretrained(tmp_path / "adapter")
        reloaded = peft.PeftModel.from_pretrained(make_model(config), tmp_path / "adapter").eval()
        assert torch.equal(reloaded(ids).logits, logits)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-5, atol=1e-5)
        merged.save_pretrained(tmp_path / "merged")
        loaded = LoopedForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(loaded(ids).logits, merged(ids).logits)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied_head


def test_lora_trains_the_adapter_alone_in_every_pass(tiny_config, make_model, random_ids):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make_model(tiny_config()), peft.LoraConfig(target_modules=CORE, layers_to_transform=[1])
    )
    draw_adapters(model)
    ids = random_ids(2, 12)
    model(ids, labels=ids).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(trained) == 2 * len(CORE)
    assert all(".layers.1." in name and "lora_" in name for name in trained)


# B65
def test_lora_on_a_tied_head_reloads_and_merges_once_untied(tiny_config, make_model, random_ids, tmp_path):
    """PEFT would merge such an adapter into the shared matrix, and so into the embedding: it says so. Untie first."""
    peft = pytest.importorskip("peft")
    config = tiny_config(tie_word_embeddings=True)
    lora = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=4)
    ids = random_ids(2, 12)
    with pytest.warns(UserWarning, match="tie_word_embeddings=True"), torch.no_grad():
        model = peft.get_peft_model(make_model(config), lora).eval()
        draw_adapters(model)
        logits = model(ids).logits
        model.save_pretrained(tmp_path / "adapter")
        reloaded = peft.PeftModel.from_pretrained(make_model(config), tmp_path / "adapter").eval()
        assert torch.equal(reloaded(ids).logits, logits)

    untied = make_model(config)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    with torch.no_grad():
        merged = peft.PeftModel.from_pretrained(untied, tmp_path / "adapter").merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(merged.model.embed_tokens.weight, make_model(config).model.embed_tokens.weight)
        merged.save_pretrained(tmp_path / "merged")
        assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
        assert torch.equal(LoopedForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits, merged(ids).logits)


def test_loss_without_logits_refuses_an_adapter_on_the_head(tiny_config, make_model, random_ids):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(tiny_config()), peft.LoraConfig(target_modules=["lm_head"], r=4))
    ids = random_ids(2, 12)
    with pytest.raises(ValueError, match="`skip_logits=True` reads the weight of `lm_head` and would miss"):
        model(ids, labels=ids, skip_logits=True)
