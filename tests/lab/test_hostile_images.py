"""Hostile images in a folder: narrow, huge, turned, damaged, badly named."""

import io
import struct
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from rankgrad.lab.cli import main
from rankgrad.lab.detection import config as detection
from rankgrad.lab.detection import data as detection_data
from rankgrad.lab.detection import scenes as kept_scenes
from rankgrad.lab.detection import voc
from rankgrad.lab.detection.task import SceneSource
from rankgrad.lab.retrieval.images.config import View
from rankgrad.lab.retrieval.images.source import decode
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision import decoding
from rankgrad.lab.vision.images import Store
from rankgrad.lab.vision.images import decode as decode_whole

import images
import scenes

CPU = torch.device("cpu")
VIEW = View(resize=256, crop=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def png(width, height):
    """A black image of any size in a few bytes, as zlib packs it."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    packer, rows = zlib.compressobj(9), b"\0" * (1 + (width + 7) // 8)
    body = b"".join(packer.compress(rows) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (1, 17), (2_000_000, 1), (170, 10)])
def test_strips_are_broken_and_never_decoded(tmp_path, monkeypatch, size):
    (tmp_path / "strip.png").write_bytes(png(*size))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    for read in (lambda path: decode(path, VIEW), lambda path: decode_whole(path, 1000)):
        with pytest.raises(
            ValueError, match=f"^{size[0]} x {size[1]} pixels: expected sides of a ratio up to 16$"
        ):
            read(tmp_path / "strip.png")


def test_a_ratio_of_16_is_an_image(tmp_path):
    (tmp_path / "a.png").write_bytes(png(160, 10))
    assert decode(tmp_path / "a.png", View(resize=20, crop=16)).shape == (20, 320, 3)


def test_strips_in_a_folder_are_one_line(tmp_path):
    root = images.folder_set(tmp_path / "data")
    (root / "class1" / "strip.png").write_bytes(png(1, 4000))
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "train",
                "folder",
                "--data",
                str(root),
                "--out",
                str(tmp_path / "out"),
                "backbone=tiny",
                "weights=none",
            ]
        )
    assert "1 of 37 images cannot be read: class1/strip.png: broken (1 x 4000 pixels" in caught.value.code


def test_formats_that_start_programs_are_not_read(tmp_path):
    with (tmp_path / "a.jpg").open("wb") as file:
        Image.new("RGB", (20, 20)).save(file, "EPS")
    with pytest.raises(OSError, match="cannot identify image file"):
        decode(tmp_path / "a.jpg", VIEW)
    for kind in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        Image.new("RGB", (20, 20), (200, 10, 10)).save(tmp_path / "b.jpg", kind)
        found = decode(tmp_path / "b.jpg", View(resize=20, crop=16))
        assert (
            found.shape == (20, 20, 3) and found[..., 0].float().mean() > 180 > 50 > found[..., 1].float().mean()
        )


def test_threads_share_a_budget():
    budget, most, lock = decoding.Budget(100), [], threading.Lock()
    held = [0]

    def work(size):
        with budget.of(size):
            with lock:
                held[0] += min(size, 100)
                most.append(held[0])
            time.sleep(0.002)
            with lock:
                held[0] -= min(size, 100)

    threads = [threading.Thread(target=work, args=(size,)) for size in [30, 50, 1000, 20, 60, 100, 5] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 28 and 50 < max(most) <= 100 and budget.used == 0
    with pytest.raises(KeyError), budget.of(100):
        raise KeyError
    assert budget.used == 0


def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    """Sixteen workers, images of 12 x 40,000 bytes each, a budget of one and a half of them."""
    for n in range(6):
        (tmp_path / f"{n}.png").write_bytes(png(200, 200))
    monkeypatch.setattr(decoding, "BUDGET", decoding.Budget(18 * 200 * 200))
    inside, most, inner = [0], [], Image.Image.convert

    def convert(self, *args, **options):
        inside[0] += 1
        most.append(inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return inner(self, *args, **options)

    monkeypatch.setattr(Image.Image, "convert", convert)
    paths = sorted(tmp_path.glob("*.png"))
    store = Store(paths, [p.name for p in paths], lambda p: decode(p, VIEW), cache="ram", workers=16, device=CPU)
    assert not store.faults and len(store.cache) == 6 and max(most) == 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_detectors_read_large_images_reduced(tmp_path, kind):
    pixels = np.zeros((900, 1600, 3), np.uint8)
    pixels[300:600, 800:1200] = 255
    Image.fromarray(pixels).save(tmp_path / "a.jpg", kind, **({"quality": 95} if kind == "JPEG" else {}))
    for longest, shape in ((2000, (900, 1600)), (801, (900, 1600)), (800, (450, 800)), (200, (113, 200))):
        found = decode_whole(tmp_path / "a.jpg", longest)
        assert found.shape == (*shape, 3)
        scale = shape[1] / 1600
        inner = found[int(310 * scale) : int(590 * scale), int(810 * scale) : int(1190 * scale)]
        assert inner.float().mean() > 245 and found[: int(280 * scale)].float().mean() < 10


def test_boxes_follow_reduced_images(tmp_path):
    base = tmp_path
    (base / "Annotations").mkdir()
    Image.fromarray(np.zeros((900, 1600, 3), np.uint8)).save(base / "a.png")
    (base / "a.xml").write_text(scenes.annotation([("cat", (801, 301, 1200, 600), False)], (1600, 900)))
    annotation = voc.read_annotation(base / "a.xml", base / "a.png")
    made = kept_scenes.scenes_of([(base / "a.png", "a", annotation)], ("cat",), [])
    source = SceneSource(made, detection.Data(name="voc"), 400, CPU, lambda done: None)
    assert source.shapes.tolist() == [[225, 400]]
    assert source.scenes.objects[0].boxes.tolist() == [[200.0, 75.0, 300.0, 150.0]]
    untouched = SceneSource(made, detection.Data(name="voc"), 1000, CPU, lambda done: None)
    assert untouched.scenes.objects[0].boxes.tolist() == [[800.0, 300.0, 1200.0, 600.0]]


def test_boxes_follow_images_whose_sides_are_not_reduced_alike(tmp_path):
    """901 rows become 226, not 225.25."""
    made = kept_scenes.Scenes(
        [tmp_path / "a"],
        ["a"],
        [kept_scenes.Objects(torch.tensor([[800.0, 0.0, 1600.0, 901.0]]), torch.ones(1), torch.zeros(1))],
        [(1600.0, 901.0)],
    ).resized(torch.tensor([[226, 400]]))
    assert made.objects[0].boxes.tolist() == [pytest.approx([200.0, 0.0, 400.0, 226.0])]
    assert made.sizes == [(400.0, 226.0)]


def turned(path, orientation, size=(64, 48), kind="JPEG"):
    """A landscape with a white top left corner, stored so that a viewer has to turn it upright."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[: size[1] // 3, : size[0] // 3] = 255
    image = Image.fromarray(pixels)
    stored = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    image = image.transpose(stored[orientation]) if orientation in stored else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, kind, exif=exif)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_images_are_turned_upright_for_retrieval_and_detection(tmp_path, orientation, kind):
    turned(tmp_path / "a.jpg", orientation, kind=kind)
    assert decoding.size_of(tmp_path / "a.jpg") == (64, 48)
    for found in (decode(tmp_path / "a.jpg", View(resize=48, crop=48)), decode_whole(tmp_path / "a.jpg", 1000)):
        assert found.shape == (48, 64, 3)
        assert found[:12, :18].float().mean() > 220 and found[24:].float().mean() < 30


def test_boxes_are_checked_against_the_turned_size(tmp_path):
    root = scenes.voc_set(tmp_path)
    config = detection.Data(name="voc", root=str(root), workers=2)
    turned(root / "JPEGImages" / "000001.jpg", 6)  # 48 x 64 in the file, 64 x 48 as it is shown
    (root / "Annotations" / "000001.xml").write_text(
        scenes.annotation([("sky", (50, 1, 64, 48), False)], (64, 48))
    )
    train = detection_data.read(config).train
    source = SceneSource(train, config, 1000, CPU, lambda done: None)
    assert not source.faults and source.shapes[1].tolist() == [48, 64]
    annotation = root / "Annotations" / "000001.xml"
    annotation.write_text(scenes.annotation([("sky", (3, 50, 20, 60), False)], (0, 0)))
    with pytest.raises(UserError, match=r"000001\.xml: .*nothing of the 64 x 48 pixels"):
        detection_data.read(config)
    annotation.write_text(scenes.annotation([("sky", (3, 50, 20, 60), False)], (48, 64)))
    source = SceneSource(detection_data.read(config).train, config, 1000, CPU, lambda done: None)
    assert source.faults == ["000001: broken (64 x 48 pixels, 48 x 64 in the annotation)"]


def test_pngs_are_what_they_say():
    """The tests' own drawing of PNGs."""
    with Image.open(io.BytesIO(png(33, 5))) as file:
        assert file.size == (33, 5) and not np.array(file).any()


def webp_with_zeros(size):
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "WEBP")
    return file.getvalue()


def png_with(name, size, *, after):
    """A PNG with a chunk of ``size`` bytes before or after its pixels; the file ends where the chunk begins."""
    whole = png(32, 32)
    return (whole[:-12] if after else whole[:33]) + struct.pack(">I", size) + name + b"a\0\0"


def tiff_with_a_tag(size):
    tags = [(256, 4, 1, 32), (257, 4, 1, 32), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 200)]
    tags += [(277, 3, 1, 1), (278, 4, 1, 32), (279, 4, 1, 1024), (700, 1, size, 200)]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)


@pytest.mark.parametrize(
    "begin",
    [
        webp_with_zeros,
        lambda size: png_with(b"iCCP", size, after=False),
        lambda size: png_with(b"prVt", size, after=True),
        tiff_with_a_tag,
    ],
    ids=["webp", "profile", "behind the pixels", "tag"],
)
def test_images_with_far_more_bytes_than_pixels(tmp_path, begin):
    """200 MB that take no place on the disk, in an image of 32 x 32: not read to their end."""
    path = tmp_path / "a.png"
    path.write_bytes(begin(190_000_000))
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    for read in (lambda: decode(path, VIEW), lambda: decode_whole(path, 1000)):
        with pytest.raises(ValueError, match=r"^expected at most 67,1\d\d,\d\d\d bytes of pixels and what stands"):
            read()


def test_headers_count_in_the_budget(tmp_path, monkeypatch):
    """Each of sixteen workers may open an image whose header takes far more memory than its pixels."""
    held, inner = [], decoding.Budget.of

    def of(self, size):
        held.append(size)
        return inner(self, size)

    monkeypatch.setattr(decoding.Budget, "of", of)
    path = tmp_path / "a.webp"
    Image.new("RGB", (32, 32)).save(path)
    with path.open("r+b") as file:
        file.truncate(1_000_000)
    decode(path, View(resize=20, crop=16))
    assert held == [48_000_000, pytest.approx(48_000_000 + 16 * 32 * 32, abs=1000)]
    held.clear()
    assert decoding.size_of(path) == (32, 32) and held == [48_000_000]
