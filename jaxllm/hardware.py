"""What the accelerators can do: the numbers behind MFU and `jaxllm.plan`. Data-sheet values, dense (never "with
sparsity"), per GPU.

A device that is not listed has no entry: MFU is then left out rather than computed against a guess. MIG slices are not
listed either, since a slice's peak is not its card's. Measured speeds do not belong here; they live in
benchmarks/results.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Peaks of one GPU. FLOP/s are dense tensor-core rates with float32 accumulation; links are per GPU and per
    direction."""

    name: str
    bf16_flops: float  # FLOP/s
    fp8_flops: float | None  # FLOP/s; None: no fp8 tensor cores
    tf32_flops: float  # FLOP/s; what a float32 matmul gets when precision "default" allows TF32
    fp32_flops: float  # FLOP/s outside the tensor cores; what a float32 matmul gets with precision "highest"
    memory_gib: float  # GiB = 2**30 bytes, the total that nvidia-smi shows
    memory_bandwidth: float  # bytes/s
    nvlink_bandwidth: float  # bytes/s to the other GPUs of a node, one direction; half of the data sheet's "total"
    nic_bandwidth: (
        float | None
    )  # bytes/s out of the node, one direction, in the usual 8-GPU machine; None: none is usual

    def peak_flops(self, dtype: str) -> float | None:
        """Peak for matmuls whose operands are "bfloat16", "float16", "float8" or "float32" (TF32); None where the
        device has no such unit."""
        return {
            "bfloat16": self.bf16_flops,
            "float16": self.bf16_flops,
            "float8": self.fp8_flops,
            "float32": self.tf32_flops,
        }[dtype]


# Sources: NVIDIA's data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 Tensor Core GPU", "L40S", "HGX
# B200"; dense figures are half of those printed "with sparsity". NICs: 8 x ConnectX-7 400 Gb/s (DGX H100/H200/B200, AWS
# p5: 3,200 Gb/s), 8 x 200 Gb/s (DGX A100). Where a device has no NVLink (L40S, A100/H100 PCIe without the bridge), the
# link is PCIe: 16 lanes of generation 4 carry 32e9 bytes/s, of generation 5 (H100) 64e9.
HARDWARE = {
    "h100": Hardware("H100 SXM", 989.4e12, 1978.9e12, 494.7e12, 66.9e12, 79.6, 3.35e12, 450e9, 50e9),
    "h100-pcie": Hardware("H100 PCIe", 756e12, 1513e12, 378e12, 51e12, 79.6, 2.0e12, 64e9, None),
    "h100-nvl": Hardware("H100 NVL", 835e12, 1671e12, 417e12, 60e12, 93.6, 3.9e12, 300e9, None),
    "h200": Hardware("H200 SXM", 989.4e12, 1978.9e12, 494.7e12, 66.9e12, 140.4, 4.8e12, 450e9, 50e9),
    "a100-80": Hardware("A100 SXM 80 GB", 312e12, None, 156e12, 19.5e12, 80.0, 2.039e12, 300e9, 25e9),
    "a100-40": Hardware("A100 SXM 40 GB", 312e12, None, 156e12, 19.5e12, 40.0, 1.555e12, 300e9, 25e9),
    "a100-80-pcie": Hardware("A100 PCIe 80 GB", 312e12, None, 156e12, 19.5e12, 80.0, 1.935e12, 32e9, None),
    "l40s": Hardware("L40S", 362e12, 733e12, 183e12, 91.6e12, 45.0, 0.864e12, 32e9, None),
    "b200": Hardware("B200", 2250e12, 4500e12, 1125e12, 75e12, 179.1, 8.0e12, 900e9, 50e9),
}

# jax.Device.device_kind is the name that the driver gives. Matched whole, so that an unknown variant of a known card
# stays unknown.
_DEVICE_KINDS = {
    "H100 80GB HBM3": "h100",
    "H100 PCIe": "h100-pcie",
    "H100 NVL": "h100-nvl",
    "H200": "h200",
    "A100-SXM4-80GB": "a100-80",
    "A100-SXM4-40GB": "a100-40",
    "A100 80GB PCIe": "a100-80-pcie",
    "L40S": "l40s",
    "B200": "b200",
}


def of(device_kind: str) -> Hardware | None:
    """The entry for a `jax.Device.device_kind` such as "NVIDIA H100 80GB HBM3"; None for a device that is not listed
    ("cpu" among them)."""
    key = _DEVICE_KINDS.get(device_kind.removeprefix("NVIDIA "))
    return HARDWARE[key] if key else None


NVIDIA = ("NVIDIA", "Tesla", "Quadro")  # how its cards call themselves; those before Ampere may lack the maker's name


def compute_capability(device_kind: str) -> float | None:
    """Of this process's GPUs of that kind, 8.0 for an A100; None where there is none: for a GPU that is only compiled for, its name has to do."""
    import jax

    found = (getattr(x, "compute_capability", None) for x in jax.local_devices() if x.device_kind == device_kind)
    return next((float(x) for x in found if x and x.replace(".", "", 1).isdigit()), None)
