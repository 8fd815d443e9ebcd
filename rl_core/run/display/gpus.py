"""Published peaks of GPUs."""

from __future__ import annotations

# Dense bfloat16 of a GPU, by words of torch's name for it, the longer first.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "H800": 989,
    "H20": 148,
    "B200": 2250,
    "GB200": 2500,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A10": 125,
    "A10G": 70,
    "A6000": 155,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "3090": 71,
    "4090": 165,
    "5090": 210,
}
