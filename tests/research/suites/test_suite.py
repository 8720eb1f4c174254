from dualmap.research.suites.suite import PEERS, QUICK, STANDARD, VARIATIONS, peers, workloads_of


def test_the_standard_suite_covers_six_traces_two_sizes_and_both_presets() -> None:
    covered = workloads_of(STANDARD)

    assert len(covered) == 24
    names = {"conversation", "toolagent", "coding", "uniform", "hotspot", "agents"}
    assert {workload.traffic.name for workload in covered} == names
    assert {workload.requests for workload in covered if workload.instances == 32} == {
        32 * STANDARD.requests_per_instance
    }
    assert len(workloads_of(QUICK)) < len(covered)


def test_variations_change_the_engine_or_the_size_and_never_both() -> None:
    covered = workloads_of(VARIATIONS)
    usual = (VARIATIONS.presets[0], VARIATIONS.sizes[0])

    assert len(covered) == len(set(covered)) == len(VARIATIONS.traffic) * 10
    assert all(usual[0] == workload.preset or usual[1] == workload.instances for workload in covered)
    requests = {workload.instances: workload.requests for workload in covered}
    assert requests == {2: 480, 8: 480, 32: 1920}, "two instances get a trace as long as eight do"


def test_saturation_is_that_of_all_peers_of_some_policies_or_of_roles() -> None:
    assert peers("") == PEERS
    assert peers("preble+sglang") == ("preble fifo=preble,queue_order=fifo", "sglang fifo=sglang,queue_order=fifo")
    assert peers("6P2D")[0].endswith(",roles=6P2D,split.mode=always")
