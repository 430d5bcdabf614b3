"""Conversations with images and videos: tokens, labels, packing, and media of a batch."""

import base64
import io
import json
import re
import shutil

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from lightning.pytorch import seed_everything
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_patches import model_shape
from hf_patches.weights.auto import auto_class
from hf_patches.weights.export import export
from lightning_cp.checkpoint import consolidate
from recipes.data import MediaChatData
from recipes.data.media import Conversation
from recipes.data.pictures import BLIND_LOSS, COLOURS, Pictures
from recipes.module import CausalLMModule
from recipes.processors import load_processor, tiny_processor
from recipes.weights import LoraOptions, add_lora, load_config
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment
from tests.recipes.test_data import fake_trainer

IMAGE = {"type": "image"}


def picture(number, size=(32, 32)):
    """A picture that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
    return PIL.Image.fromarray(pixels)


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def text(value):
    return {"type": "text", "text": value}


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        picture(number).save(tmp_path / f"{number}.png")
    return tmp_path


def image(number):
    return {"type": "image", "path": f"{number}.png"}


CONVERSATIONS = [
    turns([image(0), text("What? "), image(1)], "A thing.", "And now?", [text("Nothing.")]),
    turns("No picture.", "Indeed."),
    turns([text("See "), image(2)], "Two.", [image(3), text(" too?")], "Yes."),
]


def write(folder, records):
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def media_data(folder, records=None, **options):
    given = [{"messages": m} for m in CONVERSATIONS] if records is None else records
    source = write(folder, given) if isinstance(given, list) else given
    options = {"seq_len": 256, "val_fraction": 0.0, "cache_dir": str(folder / "cache"), **options}
    return MediaChatData(source, **options)


def batch_of(data):
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def as_stock(messages):
    """Messages as transformers takes them, with decoded pictures."""
    out = []
    for message in messages:
        content = message["content"]
        parts = [text(content)] if isinstance(content, str) else content
        parts = [
            {"type": "image", "image": picture(int(p["path"][0]))} if p["type"] == "image" else p
            for p in parts
        ]
        out.append({**message, "content": parts})
    return out


def stock(processor, messages):
    """What transformers makes of a conversation: the reference."""
    return processor.apply_chat_template(
        as_stock(messages),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )


def unmarked(folder):
    """The processor with a template that does not mark answers."""
    processor = tiny_processor()
    template = processor.chat_template
    for mark in ("{%- generation -%}", "{%- endgeneration -%}"):
        template = template.replace(mark, "")
    processor.chat_template = template
    processor.save_pretrained(folder / "processor")
    return str(folder / "processor")


@pytest.mark.parametrize(
    ("marks", "num_workers"), [(True, 0), (False, 1)], ids=["generation marks", "prefixes, worker"]
)
def test_packed_conversations_are_those_of_the_processor(folder, marks, num_workers):
    options = {} if marks else {"processor": unmarked(folder)}
    batch = batch_of(media_data(folder, num_workers=num_workers, **options))
    expected = [stock(tiny_processor(), messages) for messages in CONVERSATIONS]
    documents = batch["document_ids"][0]
    for number, one in enumerate(expected):
        at = documents == number
        assert torch.equal(batch["input_ids"][0][at], one["input_ids"][0])
        learned = torch.as_tensor(one["assistant_masks"][0]).bool()
        labels = one["input_ids"][0].masked_fill(~learned, -100)
        if learned.any():  # transformers 5.17 marks no answer beside pictures
            assert torch.equal(batch["labels"][0][at], labels)
    assert set(documents.tolist()) == {0, 1, 2, -1}
    assert (batch["labels"][0][documents < 0] == -100).all()
    pixels = torch.cat([one["pixel_values"] for one in expected if "pixel_values" in one])
    assert torch.equal(batch["pixel_values"], pixels)


def test_samples_of_a_batch_have_their_media_one_after_the_other(folder):
    data = media_data(folder, seq_len=100, batch_size=2)
    batch = batch_of(data)
    assert [len(numbers) for numbers in data.train_samples()["media"]] == [1, 1]
    is_first = "What?" in data.tokenizer.decode(batch["input_ids"][0])
    order = [0, 1, 2, 3] if is_first else [2, 3, 0, 1]
    pixels = [stock(tiny_processor(), turns([image(i)], "x"))["pixel_values"] for i in order]
    assert torch.equal(batch["pixel_values"], torch.cat(pixels))


def kinds_of_records(folder):
    """The same conversation, with its pictures given in different ways."""
    content = [png(picture(number)) for number in (0, 1)]
    encoded = [base64.b64encode(x).decode() for x in content]
    names = ["0.png", "1.png"]

    def by_part(parts):
        return {"messages": turns([*parts, text("Which?")], [text("Both.")])}

    listed = by_part([IMAGE, IMAGE])
    saved = datasets.Dataset.from_list([{**listed, "images": [{"bytes": x} for x in content]}])
    feature = datasets.List(datasets.Image())
    saved.cast_column("images", feature).save_to_disk(folder / "saved")
    nested = [{"type": "image", "image": {"bytes": x, "path": None}} for x in content]
    datasets.Dataset.from_list([by_part([*nested])]).save_to_disk(folder / "nested")
    marked = turns("<image><image>Which?", "Both.")
    share = [{"from": "human", "value": marked[0]["content"]}, {"from": "gpt", "value": "Both."}]
    urls = [f"data:image/png;base64,{x}" for x in encoded]
    return {
        "path": [by_part([{"type": "image", "path": x} for x in names])],
        "image": [by_part([{"type": "image", "image": x} for x in names])],
        "absolute": [by_part([{"type": "image", "url": f"file://{folder}/{x}"} for x in names])],
        "base64": [by_part([{"type": "image", "base64": x} for x in encoded])],
        "data url": [by_part([{"type": "image_url", "image_url": {"url": x}} for x in urls])],
        "list of paths": [{**listed, "images": names}],
        "list of bytes": str(folder / "saved"),
        "bytes in parts": str(folder / "nested"),
        "marks in a text": [{"messages": marked, "images": names}],
        "sharegpt": [{"conversations": share, "images": names}],
    }


def test_pictures_may_be_given_in_many_ways(folder):
    batches = {}
    for name, records in kinds_of_records(folder).items():
        batches[name] = batch_of(media_data(folder, records))
        shutil.rmtree(folder / "cache")
    expected = batches.pop("path")
    assert expected["pixel_values"].shape == (2, 3, 32, 32)
    for name, batch in batches.items():
        assert batch.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(batch[key], value), (name, key)


def test_pictures_are_decoded_with_their_batch(folder, monkeypatch):
    decoded = []
    stock_load = Conversation.load

    def load(self, processor):
        decoded.append(self.number)
        return stock_load(self, processor)

    monkeypatch.setattr(Conversation, "load", load)
    data = media_data(folder, seq_len=100)
    data.prepare_data()
    assert decoded == [0, 1, 2]  # once, for their tokens
    decoded.clear()
    again = media_data(folder, data.source, seq_len=100)
    again.prepare_data()
    again.setup("fit")
    loader = iter(again.train_dataloader())
    assert decoded == []
    next(loader)
    assert len(decoded) == 1


REFUSED = {
    "a missing file": (
        [{"messages": turns([{"type": "image", "path": "no.png"}], "x")}],
        r"Conversation 0: its image 'no.png' is missing: there is no file .*/no.png. Paths are",
    ),
    "no picture": (
        [{"messages": turns([{"type": "image", "path": "chat.jsonl"}], "x")}],
        "Conversation 0: the image .*chat.jsonl cannot be decoded",
    ),
    "an address": (
        [{"messages": turns([{"type": "image", "url": "https://x.org/a.png"}], "x")}],
        "is the address https://x.org/a.png. Download media first",
    ),
    "bad base64": (
        [{"messages": turns([{"type": "image", "base64": "?"}], "x")}],
        "its image is not base64",
    ),
    "a number": (
        [{"messages": turns([{"type": "image", "image": 3}], "x")}],
        "its image is a int. Give a path, bytes, or base64",
    ),
    "too few pictures": (
        [{"messages": turns([IMAGE, IMAGE], "x"), "images": ["0.png"]}],
        "has a part .*image.* without a source",
    ),
    "too many pictures": (
        [{"messages": turns([IMAGE], "x"), "images": ["0.png", "1.png"]}],
        "has 2 images in its list, but its messages have places for 1",
    ),
    "a placeholder in a text": (
        [{"messages": turns("What is <image>?", "x")}],
        "Conversation 0 has 0 images, but its text has 1 placeholders '<image>'",
    ),
    "sound": (
        [{"messages": turns([{"type": "audio", "path": "a.wav"}], "x")}],
        "Conversation 0 has the part .*audio.*Parts are",
    ),
    "a video": (
        [{"messages": turns([{"type": "video", "path": "a.mp4"}], "x")}],
        "Conversation 0 has a video, but a LlavaProcessor takes none",
    ),
    "a picture in an answer": (
        [{"messages": turns("Draw.", [image(0)])}],
        "Conversation 0 has media in an answer",
    ),
    "no messages": ([{"messages": "hello"}], "Conversation 0 is not a list of messages"),
    "no content": (
        [{"messages": [{"role": "user"}]}],
        "has a message whose content is a NoneType",
    ),
    "too long": (
        [{"messages": turns([image(0), text("x" * 300)], "x")}],
        r"Conversation 0 has 3\d\d tokens with its media, but samples hold seq_len=256",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_records_are_refused(folder, name):
    records, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        media_data(folder, records).prepare_data()


def test_long_conversations_are_skipped_if_asked(folder, capsys):
    long = turns([image(0), text("x" * 300)], "x")
    records = [{"messages": long}, {"messages": CONVERSATIONS[0]}]
    batch = batch_of(media_data(folder, records, long_documents="skip"))
    assert "skipped 1 conversations of more than seq_len=256 tokens" in capsys.readouterr().out
    assert batch["pixel_values"].shape[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long_documents": "split"}, "long_documents='split'"),
        ({"tokenizer": "x"}, "tokenizer='x' is not for conversations with media: the processor"),
    ],
)
def test_options_that_would_cut_media_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        media_data(folder, **options)


def test_what_is_no_processor_is_refused(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="nowhere': there is no such folder"):
        load_processor("./nowhere")
    with pytest.raises(ValueError, match="nobody/nothing' could not be loaded"):
        load_processor("nobody/nothing")
    tiny_processor().tokenizer.save_pretrained(folder / "text")
    load_config(None).save_pretrained(folder / "text")
    with pytest.raises(ValueError, match="the folder has no processor of text and media"):
        load_processor(str(folder / "text"))
    processor = tiny_processor()
    processor.chat_template = processor.tokenizer.chat_template = None
    processor.save_pretrained(folder / "mute")
    with pytest.raises(ValueError, match="has no chat template"):
        media_data(folder, processor=str(folder / "mute")).prepare_data()


def test_a_processor_that_hides_where_media_are_is_refused(folder, monkeypatch):
    data, kind = media_data(folder), type(tiny_processor())
    process = kind.__call__
    monkeypatch.setattr(
        kind,
        "__call__",
        lambda *args, **options: {
            name: value
            for name, value in process(*args, **options).items()
            if name != "text_replacement_offsets"
        },
    )
    with pytest.raises(ValueError, match="LlavaProcessor does not say where it puts placeholders"):
        data.prepare_data()


def test_a_picture_that_changed_is_noticed(folder):
    data = media_data(folder)
    data.prepare_data()
    data.setup("fit")
    data.processor.patch_size = 16  # as a picture of another size would give with other processors
    with pytest.raises(ValueError, match=r"images of the conversations .* take 16 tokens, but 64 "):
        next(iter(data.train_dataloader()))


def test_images_of_packed_conversations_are_processed_as_those_of_each(folder, monkeypatch):
    # LLaVA-OneVision divides an image into tiles if its conversation has no other one. Its video
    # processor needs torchvision.
    cls = transformers.LlavaOnevisionProcessor
    monkeypatch.setattr(cls, "check_argument_for_proper_class", lambda *_: None)
    single = [turns([image(number), text("What?")], "A thing.") for number in (0, 1)]
    records = [{"messages": m} for m in (*single, CONVERSATIONS[0])]
    data = media_data(folder, records, seq_len=512)
    embedded = data.processor
    processor = data.__dict__["processor"] = cls(
        image_processor=transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 32, "width": 32}, image_grid_pinpoints=[[32, 64], [64, 64]]
        ),
        tokenizer=embedded.tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=embedded.chat_template,
    )
    monkeypatch.setattr(data, "fingerprint_options", dict)
    batch = batch_of(data)
    assert sorted(batch["batch_num_images"].tolist()) == [1, 1, 2]
    assert len(batch["image_sizes"]) == 4
    # An image, its tiles and a token for each of their lines; or an image and one such token.
    tokens = (batch["input_ids"] == processor.image_token_id).sum()
    assert tokens == 2 * (16 + 16 + 4) + 2 * (16 + 1)


def test_samples_without_media_need_one_data_rank(folder):
    records = [{"messages": turns("a" * 100, "b" * 100)}, {"messages": CONVERSATIONS[0]}]
    data = media_data(folder, records)
    data.prepare_data()
    data.setup("fit")
    data.trainer = fake_trainer(0, 1)
    data.train_dataloader()
    data.trainer = fake_trainer(0, 2)
    with pytest.raises(ValueError, match=r"differ in their media \(none, images\)"):
        data.train_dataloader()


def test_media_of_different_shapes_are_not_joined(folder, monkeypatch):
    data = media_data(folder, seq_len=100, batch_size=2)
    data.prepare_data()
    data.setup("fit")
    kind, sizes = type(tiny_processor()), iter((32, 64))
    process = kind.__call__

    def other_sizes(*args, **options):
        side = next(sizes)
        return {**process(*args, **options), "pixel_values": torch.zeros(2, 3, side, side)}

    monkeypatch.setattr(kind, "__call__", other_sizes)
    with pytest.raises(ValueError, match="`pixel_values` of the shapes .*batch_size=1"):
        next(iter(data.train_dataloader()))


def test_another_source_has_a_folder_of_its_own(folder):
    (folder / "other").mkdir()
    picture(7).save(folder / "other" / "0.png")
    source = write(folder / "other", [{"messages": turns([image(0)], "x")}])
    for given in (None, str(folder / "chat.jsonl")):
        write(folder, [{"messages": CONVERSATIONS[0]}])
        data = MediaChatData(
            given,
            val_source=source,
            seq_len=256,
            max_documents=8,
            cache_dir=str(folder / "cache"),
        )
        data.prepare_data()
        data.setup("fit")
        (batch,) = data.val_dataloader()
        expected = tiny_processor().image_processor(picture(7), return_tensors="pt")
        assert torch.equal(batch["pixel_values"], expected["pixel_values"])


# ---------------------------------------------------------------- generated pictures


def test_colours_cannot_be_guessed_from_the_text():
    records = [Pictures()[index] for index in range(64)]
    asked = [r["messages"][0]["content"] for r in records if r["images"]]
    answers = [r["messages"][1]["content"] for r in records if r["images"]]
    assert all(parts == asked[0] for parts in asked)
    assert len(set(answers)) > 50
    assert pytest.approx(1.66, abs=5e-3) == BLIND_LOSS
    for record, letters in zip(records[:4], answers, strict=False):
        opened = PIL.Image.open(io.BytesIO(record["images"][0]))
        seen = [opened.getpixel(at) for at in ((8, 8), (24, 8), (8, 24), (24, 24))]
        assert seen == [COLOURS[letter] for letter in letters]


# ---------------------------------------------------------------- videos


def qwen3_vl_processor():
    pytest.importorskip("torchvision")
    specials = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
    from recipes.tokens import byte_tokenizer

    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% for p in m['content'] %}"
        "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}{{ '<|vision_start|><|' + p['type'] "
        "+ '_pad|><|vision_end|>' }}{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=8, size=size),
        tokenizer=byte_tokenizer(*specials),
        video_processor=transformers.Qwen3VLVideoProcessor(
            patch_size=8, size={"shortest_edge": 4 * 32 * 32, "longest_edge": 16 * 64 * 64}
        ),
        chat_template=template,
    )


def test_videos_and_images_of_several_sizes(folder):
    processor = qwen3_vl_processor()
    processor.save_pretrained(folder / "qwen")
    picture(0, (64, 32)).save(folder / "wide.png")
    for number in range(6):
        picture(number, (48, 32)).save(folder / f"frame{number}.png")
    frames = [f"frame{number}.png" for number in range(6)]
    video = {"type": "video", "video": frames, "fps": 2.0}
    wide = {"type": "image", "path": "wide.png"}
    conversations = [
        turns([video, text("Long?"), wide], "Three seconds."),
        turns([image(1)], "One.", [image(2), text("?")], "Two."),
    ]
    records = [{"messages": m} for m in conversations]
    batch = batch_of(media_data(folder, records, processor=str(folder / "qwen"), seq_len=512))
    kinds = batch["mm_token_type_ids"][0]
    for kind, name in ((1, "image"), (2, "video")):
        grids = batch[f"{name}_grid_thw"]
        assert (kinds == kind).sum() * 4 == grids.prod(-1).sum()
    assert batch["image_grid_thw"].shape == (3, 3)
    assert batch["video_grid_thw"][0, 0] == 3  # pairs of frames
    decoded = processor.tokenizer.decode(batch["input_ids"][0])
    assert re.findall(r"<[\d.]+ seconds>", decoded) == [
        "<0.2 seconds>",
        "<1.2 seconds>",
        "<2.2 seconds>",
    ]
    learned = batch["labels"][0] != -100
    said = processor.tokenizer.decode(batch["labels"][0][learned])
    assert said == "Three seconds.<eos>One.<eos>Two.<eos>"


def test_video_files_are_sampled_as_the_processor_says(folder):
    av = pytest.importorskip("av")
    qwen3_vl_processor().save_pretrained(folder / "qwen")
    file = folder / "film.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = 64, 32
        for number in range(32):
            frame = av.VideoFrame.from_ndarray(np.asarray(picture(number, (64, 32))))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    parts = {
        "path": {"type": "video", "path": "film.mp4"},
        "base64": {"type": "video", "base64": base64.b64encode(file.read_bytes()).decode()},
    }
    batches = [
        batch_of(
            media_data(
                folder,
                [{"messages": turns([part], "x")}],
                processor=str(folder / "qwen"),
                cache_dir=str(folder / name),
            )
        )
        for name, part in parts.items()
    ]
    # Four seconds at two frames per second, in pairs.
    assert batches[0]["video_grid_thw"].tolist()[0][0] == 4
    for key, value in batches[0].items():
        assert torch.equal(batches[1][key], value), key


# ---------------------------------------------------------------- the model


def test_adapters_stay_in_the_text_decoder_unless_asked():
    def adapted(**options):
        with torch.device("meta"):
            model = auto_class(load_config("tiny-image")).from_config(load_config("tiny-image"))
        wrapped = add_lora(model, LoraOptions(rank=2, **options))
        return {name for name, p in wrapped.named_parameters() if p.requires_grad}

    for targets in ("all-linear", ["q_proj", "v_proj"]):
        names = adapted(target_modules=targets)
        assert names
        assert all(".language_model." in name for name in names)
        more = adapted(target_modules=targets, adapt_towers=True)
        assert any(".vision_tower." in name for name in more)
        assert names < more


def test_the_plan_of_a_model_with_media_counts_its_towers():
    config = load_config("tiny-image")
    shape = model_shape(config)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert len(shape.layers) == config.text_config.num_hidden_layers


def generated(folder, processor=None):
    return MediaChatData(
        None,
        processor=processor,
        seq_len=150,
        batch_size=2,
        val_fraction=0.25,
        max_documents=24,
        cache_dir=str(folder / "cache"),
    )


class Doubled(CausalLMModule):
    """Trains in float64."""

    def configure_model(self):
        super().configure_model()
        self.model.double()


def fit(folder, options, devices, build=generated):
    """Train; return the validation loss, and all weights."""
    with elastic_environment():
        seed_everything(0)
        module = Doubled(lr=1e-2, warmup_steps=1, gradient_checkpointing=False, **options)
        data = build(folder)
        run = build_trainer(
            strategy=doors.strategy(context_parallel_size=devices),
            default_root_dir=folder,
            max_steps=3,
            max_epochs=-1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
        )
        run.fit(module, data)
        run.save_checkpoint(folder / "checkpoint.ckpt")
        (found,) = run.validate(module, data, verbose=False)
        weights = {n: p.full_tensor().detach() for n, p in module.model.named_parameters()}
    return found["val_loss"], weights


def validate_folder(folder, path):
    """Return the validation loss of pretrained weights."""
    with elastic_environment():
        data = generated(folder, processor=path)
        run = build_trainer(strategy=doors.strategy(), default_root_dir=folder, limit_val_batches=1)
        (found,) = run.validate(Doubled(model=path), data, verbose=False)
    return found["val_loss"]


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_train_as_one_and_the_export_has_the_same_loss(ranks, tmp_path):
    options = {"model": "tiny-image", "freeze": ["*vision_tower.embeddings*"]}
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    ((loss, weights),) = ranks(1).run(fit, tmp_path / "alone", options, 1)
    for other_loss, others in ranks(2).run(fit, tmp_path / "shared", options, 2):
        assert other_loss == pytest.approx(loss, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-8, atol=1e-10, msg=name)

    out = tmp_path / "out"
    export(tmp_path / "shared" / "checkpoint.ckpt", out)
    model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float64).eval()
    processor = AutoProcessor.from_pretrained(out)
    assert stock_loss(model, processor, tmp_path) == pytest.approx(loss, rel=1e-6)
    for again in ranks(2).run(validate_folder, tmp_path / "shared", str(out)):
        assert again == pytest.approx(loss, rel=1e-6)  # weights and processor of the folder
    consolidate(tmp_path / "shared" / "checkpoint.ckpt", tmp_path / "one.ckpt")
    module = CausalLMModule.load_from_checkpoint(tmp_path / "one.ckpt")
    assert type(module.model).__name__ == "LlavaForConditionalGeneration"


def films(folder):
    """Conversations with videos, images of several sizes, and text, for a Qwen3-VL."""
    size = [(32, 32), (64, 32), (48, 64)]
    frames = [[f"f{video}{number}.png" for number in range(4 + 2 * video)] for video in range(2)]
    for video, names in enumerate(frames):
        for number, name in enumerate(names):
            picture(10 * video + number, size[video]).save(folder / name)
    for number in range(3):
        picture(number, size[number]).save(folder / f"{number}.png")
    videos = [{"type": "video", "video": names, "fps": 2.0} for names in frames]
    kinds = [
        turns([videos[0], text("What?"), image(1)], "A film.", [image(2)], "A picture."),
        turns("Only a text.", "Yes."),
        turns([image(0), text("And then "), videos[1]], "Another film."),
    ]
    records = [{"messages": kinds[number % 3]} for number in range(12)]
    processor = str(folder.parent / "qwen")
    return media_data(folder, records, processor=processor, seq_len=301, val_fraction=0.25)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_train_on_packed_videos_as_one(ranks, tmp_path):
    processor = qwen3_vl_processor()
    processor.save_pretrained(tmp_path / "qwen")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": rope,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 8,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **{f"{name}_token_id": getattr(processor, f"{name}_token_id") for name in _TOKENS},
    ).save_pretrained(tmp_path / "qwen")
    options = {"model": str(tmp_path / "qwen"), "random_weights": True}
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    ((loss, weights),) = ranks(1).run(fit, tmp_path / "alone", options, 1, films)
    for other_loss, others in ranks(2).run(fit, tmp_path / "shared", options, 2, films):
        assert other_loss == pytest.approx(loss, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-7, atol=1e-9, msg=name)


_TOKENS = ("image", "video", "vision_start", "vision_end")


def stock_loss(model, processor, folder):
    """The loss of the validation conversations, one by one, by the stock model and processor."""
    data = generated(folder / "alone")
    data.prepare_data()
    data.setup("validate")
    total, count = 0.0, 0
    chosen = data.val_samples()
    for sample in [chosen[i] for i in range(min(2, len(chosen)))]:
        images = iter(sample["media"].tolist())
        for number in range(int(sample["document_ids"].max()) + 1):
            at = sample["document_ids"] == number
            ids, labels = sample["input_ids"][at][None], sample["labels"][at][None]
            media = {}
            if (ids == processor.image_token_id).any():
                (content,) = Pictures()[next(images)]["images"]
                opened = PIL.Image.open(io.BytesIO(content))
                media = processor.image_processor(opened, return_tensors="pt")
                media = {"pixel_values": media["pixel_values"].double()}
            with torch.no_grad():
                loss = model(input_ids=ids, labels=labels, **media).loss
            learned = int((labels != -100).sum())
            total, count = total + float(loss) * learned, count + learned
    return total / count


def refusal(config, folder):
    """Return what a run says to a model that does not fit its data."""
    config.save_pretrained(folder)
    module = CausalLMModule(str(folder), random_weights=True)
    with pytest.raises(ValueError) as error:  # noqa: PT011  its text is what comes back
        module.check_processor(tiny_processor())
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MllamaConfig(), "'mllama' cannot take packed conversations: its images"),
        (transformers.LlamaConfig(), "a model of type 'llama' takes text only"),
        (
            transformers.LlavaConfig(image_token_index=7),
            "marks places of images by token 262, but a model of type 'llava' by 7",
        ),
    ],
)
def test_models_that_do_not_take_the_data_are_refused(config, message, tmp_path):
    assert re.search(message, refusal(config, tmp_path))


def test_the_token_of_places_may_be_one_of_several():
    module, processor = CausalLMModule(model="tiny-image"), tiny_processor()
    processor.image_token_id = 5  # Gemma 3's is the token before an image
    processor.image_token_ids = [262]
    module.check_processor(processor)


def fit_adapters(folder, path):
    """Train adapters of pretrained weights; return the validation loss."""
    with elastic_environment():
        seed_everything(0)
        lora = LoraOptions(rank=2, target_modules=["q_proj", "v_proj"])
        module = Doubled(model=path, lora=lora, lr=0.1, warmup_steps=1)
        data = generated(folder, processor=path)
        run = build_trainer(
            strategy=doors.strategy(),
            default_root_dir=folder,
            max_steps=2,
            max_epochs=-1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
        )
        run.fit(module, data)
        run.save_checkpoint(folder / "checkpoint.ckpt")
        (found,) = run.validate(module, data, verbose=False)
    return found["val_loss"]


@pytest.mark.slow
@pytest.mark.ranks
def test_exported_adapters_have_the_loss_of_the_run(ranks, tmp_path):
    base = tmp_path / "base_model"
    torch.manual_seed(0)
    config = load_config("tiny-image")
    auto_class(config).from_config(config, dtype=torch.float64).save_pretrained(base)
    tiny_processor().save_pretrained(base)
    (tmp_path / "alone").mkdir()
    loss, same = ranks(2).run(fit_adapters, tmp_path / "alone", str(base))
    assert loss == same
    export(tmp_path / "alone" / "checkpoint.ckpt", tmp_path / "out")
    stock = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float64)
    start = {name: weight.clone() for name, weight in stock.state_dict().items()}
    model = PeftModel.from_pretrained(stock, tmp_path / "out").merge_and_unload()
    moved = [n for n, w in model.state_dict().items() if not torch.equal(w, start[n])]
    assert len(moved) == 2 * config.text_config.num_hidden_layers
    assert all("language_model" in name for name in moved)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert stock_loss(model.eval(), processor, tmp_path) == pytest.approx(loss, rel=1e-6)
