"""Small data sets in the official layouts, drawn by the tests: a class has a colour, an image its noise."""

import numpy as np
from PIL import Image


def image(path, label, seed, size=(24, 20), kind=None):
    """A noisy image whose colour shows its class; its real format may differ from what its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = np.random.default_rng(1000 + label).integers(122, 134, 3)
    noise = np.random.default_rng([label, seed]).integers(-40, 40, (size[1], size[0], 3))
    Image.fromarray(np.clip(colour + noise, 0, 255).astype(np.uint8)).save(path, kind)


def folder_set(root, classes=6, each=6):
    """``root/<class>/<image>``."""
    for label in range(classes):
        for number in range(each):
            image(root / f"class{label}" / f"{number}.png", label, number, size=(24 + number, 20 + label))
    return root


def cub_set(root, classes=(1, 2, 3, 101, 102, 103), each=5):
    """CUB-200-2011, with WebP inside .jpg names."""
    base, number, names, labels = root / "CUB_200_2011", 0, [], []
    for label in classes:
        for k in range(each):
            number += 1
            name = f"{label:03d}.Bird/Bird_{k}.jpg"
            image(base / "images" / name, label, k, kind="WEBP")
            names.append(f"{number} {name}")
            labels.append(f"{number} {label}")
    (base / "images.txt").write_text("\n".join(names) + "\n")
    (base / "image_class_labels.txt").write_text("\n".join(labels) + "\n")
    return root


def sop_set(root, supers=3, classes=4, each=3):
    """Stanford Online Products, with super-classes."""
    base = root / "Stanford_Online_Products"
    number, label = 0, 0
    for part in ("train", "test"):
        lines = ["image_id class_id super_class_id path"]
        for over in range(1, supers + 1):
            for _ in range(classes):
                label += 1
                for k in range(each):
                    number += 1
                    name = f"kind{over}_final/{label}_{k}.JPG"
                    image(base / name, label, k, kind="JPEG")
                    lines.append(f"{number} {label} {over} {name}")
        (base / f"Ebay_{part}.txt").write_text("\n".join(lines) + "\n")
    return root


def inshop_set(root, classes=4):
    """In-shop Clothes: the same items in query and gallery."""
    rows = []
    for part, items in (("train", range(classes)), ("test", range(classes, 2 * classes))):
        for item in items:
            for k in range(4):
                kind = ("WOMEN/Dresses", "MEN/Shirts")[item % 2]
                name = f"img/{kind}/id_{item:08d}/{k:02d}_1_front.jpg"
                image(root / "Img" / name, item, k, kind="JPEG")
                rows.append(f"{name} id_{item:08d} {part if part == 'train' else ('query', 'gallery')[k % 2]}")
    (root / "Eval").mkdir()
    text = "\n".join([str(len(rows)), "image_name item_id evaluation_status", *rows])
    (root / "Eval" / "list_eval_partition.txt").write_text(text + "\n")
    return root
