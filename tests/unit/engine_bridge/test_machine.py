from engine_bridge.settings.machine import look, memory_of, processor_of

X86 = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu avx2 amx_tile\n\nprocessor\t: 1\nmodel name\t: Some Xeon\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16\n"
MEMINFO = "MemTotal:       16384 kB\nMemFree:  100 kB\nMemAvailable:    8192 kB\n"


def test_a_processor_s_name_and_instructions_are_found_and_memory_within_a_container_s_bound() -> None:
    assert processor_of(X86) == ("Some Xeon", {"fpu", "avx2", "amx_tile"})
    name, flags = processor_of(ARM)
    assert name and flags == {"fp", "asimd", "bf16"}
    assert memory_of(MEMINFO, "max\n") == (16 << 20, 8 << 20)
    assert memory_of(MEMINFO, f"{4 << 20}\n") == (4 << 20, 4 << 20)
    machine = look()
    assert 0 < machine.num_cores <= machine.num_cores_in_all
    assert 0 < machine.available_bytes <= machine.memory_bytes
