"""Put what ``rankgrad figure`` has drawn into docs/figures: captions, and each image in its lightest form.

python docs/machinery/lighter.py DRAWN docs/figures
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image

#: Pixels across: twice the widest column of the page.
WIDTH = 1600


def light_png(path: Path) -> bytes:
    """A PNG no wider than needed, in 256 colours."""
    with Image.open(path) as image:
        flat = Image.new("RGB", image.size, "white")
        flat.paste(image, mask=image.getchannel("A") if image.mode == "RGBA" else None)
    if flat.width > WIDTH:
        flat = flat.resize((WIDTH, round(flat.height * WIDTH / flat.width)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    flat.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def collect(drawn: Path, folder: Path) -> list[Path]:
    """Every figure with a caption: the SVG if it is the lighter file, else the PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for caption in sorted(drawn.glob("*.md")):
        for old in folder.glob(f"{caption.stem}.*"):
            old.unlink()
        shutil.copyfile(caption, folder / caption.name)
        png, svg = light_png(caption.with_suffix(".png")), caption.with_suffix(".svg").read_bytes()
        written.append(folder / f"{caption.stem}.{'svg' if len(svg) < len(png) else 'png'}")
        written[-1].write_bytes(min(svg, png, key=len))
    return written


if __name__ == "__main__":
    for path in collect(Path(sys.argv[1]), Path(sys.argv[2])):
        print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
