"""The paper's retrieval tables (Rolínek et al. 2020, tables 2 to 4), to stand beside a run's own row.

A method's name is followed by embedding size and backbone (G: GoogLeNet, V: VGG, R: ResNet).
"""

from __future__ import annotations

Row = tuple[str, list[float | None]]


def _rows(text: str) -> list[Row]:
    rows: list[Row] = []
    for line in text.strip().splitlines():
        name, _, numbers = line.partition("|")
        rows.append((name.strip(), [None if n == "-" else float(n) for n in numbers.split()]))
    return rows


#: data set -> (the Ks of its columns, rows)
TABLES: dict[str, tuple[list[int], list[Row]]] = {
    "sop": (
        [1, 10, 100, 1000],
        _rows("""
        Contrastive 512 G        | 42.0 58.2 73.8 89.1
        Triplet 512 G            | 42.1 63.5 82.5 94.8
        LiftedStruct 512 G       | 62.1 79.8 91.3 97.4
        Binomial Deviance 512 G  | 65.5 82.3 92.3 97.6
        Histogram Loss 512 G     | 63.9 81.7 92.2 97.7
        N-Pair 512 G             | 67.7 83.8 93.0 97.8
        Clustering 64 G          | 67.0 83.7 93.2 -
        HDC 384 G                | 69.5 84.4 92.8 97.7
        Angular Loss 512 G       | 70.9 85.0 93.5 98.0
        Margin 128 R50           | 72.7 86.2 93.8 98.0
        Proxy NCA 64 G           | 73.7 - - -
        A-BIER 512 G             | 74.2 86.9 94.0 97.8
        HTL 128 G                | 74.8 88.3 94.8 98.4
        ABE-8 512 G              | 76.3 88.4 94.8 98.2
        FastAP 512 R50           | 76.4 89.1 95.4 98.5
        RaMBO log 512 R50        | 77.8 90.1 95.9 98.7
        RaMBO loglog 512 R50     | 78.6 90.5 96.0 98.7
        """),
    ),
    "cub": (
        [1, 2, 4, 8],
        _rows("""
        Contrastive 512 G        | 26.4 37.7 49.8 62.3
        Triplet 512 G            | 36.1 48.6 59.3 70.0
        LiftedStruct 512 G       | 47.2 58.9 70.2 80.2
        Binomial Deviance 512 G  | 52.8 64.4 74.7 83.9
        Histogram Loss 512 G     | 50.3 61.9 72.6 82.4
        N-Pair 64 G              | 51.0 63.3 74.3 83.2
        Clustering 64 G          | 48.2 61.4 71.8 81.9
        Proxy NCA 512 G          | 49.2 61.9 67.9 72.4
        Smart Mining 64 G        | 49.8 62.3 74.1 83.3
        Margin 128 G             | 63.8 74.4 83.1 90.0
        HDC 384 G                | 53.6 65.7 77.0 85.6
        Angular Loss 512 G       | 54.7 66.3 76.0 83.9
        HTL 128 G                | 57.1 68.8 78.7 86.5
        A-BIER 512 G             | 57.5 68.7 78.3 86.2
        ABE-8 512 G              | 60.6 71.5 80.5 87.7
        Proxy NCA 512 R50        | 64.0 75.4 84.2 90.5
        RaMBO log 512 R50        | 63.5 74.8 84.1 90.4
        RaMBO loglog 512 R50     | 64.0 75.3 84.1 90.6
        """),
    ),
    "inshop": (
        [1, 10, 20, 30, 50],
        _rows("""
        FashionNet V                         | 53.0 73.0 76.0 77.0 80.0
        HDC 384 G                            | 62.1 84.9 89.0 91.2 93.1
        DREML 48 R18                         | 78.4 93.7 95.8 96.7 -
        HTL 128 G                            | 80.9 94.3 95.8 97.2 97.8
        A-BIER 512 G                         | 83.1 95.1 96.9 97.5 98.0
        ABE-8 512 G                          | 87.3 96.7 97.9 98.2 98.7
        FastAP-Matlab 512 R50                | 90.9 97.7 98.5 98.8 99.1
        FastAP-Python 512 R50 (uncertain)    | 83.8 95.5 96.9 97.5 98.2
        RaMBO log 512 R50                    | 88.1 97.0 97.9 98.4 98.8
        RaMBO loglog 512 R50                 | 86.3 96.2 97.4 97.9 98.5
        """),
    ),
}
