"""Names of devices, as the drivers give them, and what is known of them."""

import pytest

from jaxllm import hardware


@pytest.mark.parametrize(
    "device_kind, key",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_driver_names_find_their_card(device_kind, key):
    assert hardware.of(device_kind) is hardware.HARDWARE[key]


@pytest.mark.parametrize("device_kind", ["cpu", "", "TPU v5p", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 96GB"])
def test_an_unknown_device_has_no_peak(device_kind):
    assert hardware.of(device_kind) is None


def test_fp8_is_twice_bf16_and_absent_before_ada():
    for card in hardware.HARDWARE.values():
        fp8 = card.peak_flops("float8")
        assert fp8 is None if "A100" in card.name else fp8 == pytest.approx(2 * card.peak_flops("bfloat16"), rel=0.02)
        assert card.peak_flops("float32") == pytest.approx(card.peak_flops("bfloat16") / 2, rel=0.02)
    assert hardware.HARDWARE["h100"].peak_flops("bfloat16") == 989.4e12
    with pytest.raises(KeyError):
        hardware.HARDWARE["h100"].peak_flops("int3")
