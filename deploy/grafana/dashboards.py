#!/usr/bin/env python3
"""The dashboards. Run this script after a change: it writes dashboards/*.json, which Grafana loads.

A test fails if those files differ from what this script writes.
"""

import json
import pathlib

from grafana_json import Panel, Variable, dashboard, mean, quantile

FOLDER = pathlib.Path(__file__).parent / "dashboards"
DURATION = "flashcore_request_duration_seconds"
PHASE = "flashcore_request_phase_seconds"
OF_RPC = '<servers>, rpc=~"$rpc", transport=~"$transport"'
SERVED = OF_RPC + ', outcome="ok"'  # a refusal is fast: it must not count in a percentile
GPU = 'Hostname=~"$host", gpu=~"$gpu"'

SERVERS = [Variable("job", "Job", "label_values(flashcore_build_info, job)"),
           Variable("instance", "Server", 'label_values(flashcore_build_info{job=~"$job"}, instance)')]
RPC = [Variable("rpc", "RPC", f"label_values({DURATION}_count, rpc)"),
       Variable("transport", "Transport", f"label_values({DURATION}_count, transport)")]
GPUS = [Variable("host", "Host", "label_values(DCGM_FI_DEV_GPU_UTIL, Hostname)"),
        Variable("gpu", "GPU", 'label_values(DCGM_FI_DEV_GPU_UTIL{Hostname=~"$host"}, gpu)')]


def _quantiles(metric, where="<servers>"):
    return {quantile(q, metric, where=where): legend
            for q, legend in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"))}


# Bounds of the rows of a heatmap, three a decade: all bounds would make rows too low to read. Buckets
# are cumulative, so some of them are a histogram, too. Prometheus 3 writes 1 as 1.0.
ROWS = "|".join(["1e-05", "2.2e-05", "5e-05", *(
    f"{step * 10 ** power:.2g}" for power in (-4, -3, -2, -1) for step in (1, 2.2, 5)), "1(.0)?",
    "10(.0)?", ".Inf"])


def _heat(metric, where):
    return f'sum by (le) (increase({metric}_bucket{{{where}, le=~"{ROWS}"}}[<window>]))'


SERVICE = dashboard(
    "flashcore-service", "FlashCore: Service", "The service as clients see it: requests, errors, latency.",
    [*SERVERS, *RPC],
    [[
        Panel("Serving", "short", {"sum(flashcore_serving{<servers>})": "serving"},
              "Servers whose gRPC health says SERVING.", "stat"),
        Panel("Version", "short", {"sum by (version) (flashcore_build_info{<servers>})": "{{version}}"},
              "Servers of each version.", "stat"),
        Panel("Request rate", "reqps", {f"sum(rate({DURATION}_count{{{OF_RPC}}}[<window>]))": ""},
              "Requests answered. Each message of a stream counts.", "stat"),
        Panel("p99 latency", "s", {quantile(0.99, DURATION, where=SERVED): ""},
              "Time of a served request on the server, from its receipt to its answer.", "stat"),
        Panel("In flight", "short", {"sum(flashcore_inflight_requests{<servers>})": ""},
              "Requests received and not yet answered.", "stat"),
        Panel("Up since", "dateTimeFromNow", {"max(process_start_time_seconds{<servers>}) * 1000": ""},
              "Start time of the server that started last.", "stat"),
    ], [
        Panel("Requests", "reqps",
              {f"sum by (rpc, transport) (rate({DURATION}_count{{{OF_RPC}}}[<window>]))":
               "{{rpc}} {{transport}}"},
              "Requests answered, by RPC and transport."),
        Panel("Outcomes", "reqps",
              {f"sum by (outcome) (rate({DURATION}_count{{{OF_RPC}}}[<window>]))": "{{outcome}}"},
              "How requests ended. Refused: before any work, because the server is full or drains.",
              stacked=True),
        Panel("Errors by reason", "reqps",
              {"sum by (reason) (rate(flashcore_rejected_requests_total{<servers>}[<window>]))":
               "{{reason}}"},
              "Requests answered with an error, including requests of streams."),
        Panel("Errors by code", "reqps",
              {'sum by (grpc_code) '
               '(rate(grpc_server_handled_total{<servers>, grpc_code!="OK"}[<window>]))':
               "{{grpc_code}}"},
              "RPCs that ended with an error. A stream is one RPC."),
    ], [
        Panel("Request latency", "s", _quantiles(DURATION, SERVED),
              "Time of a served request on the server, from its receipt to its answer."),
        Panel("Request latency heatmap", "s",
              {_heat(DURATION, SERVED): "{{le}}"}, "Served requests by duration.", "heatmap"),
    ], [
        Panel("p99 latency by RPC", "s",
              {quantile(0.99, DURATION, "rpc, transport", SERVED): "{{rpc}} {{transport}}"},
              "Of served requests. Each message of a stream counts as a request."),
        Panel("RPCs under way", "short",
              {"sum by (grpc_method) (grpc_server_started_total{<servers>})"
               " - sum by (grpc_method) (grpc_server_handled_total{<servers>})": "{{grpc_method}}"},
              "RPCs started and not yet ended. A stream counts until it ends."),
    ], [
        Panel("Latency budget burn", "short",
              {f'job:flashcore_slow_requests:ratio_rate{window}{{job=~"$job"}} / 0.01': window
               for window in ("5m", "1h", "6h", "3d")},
              "Share of requests that are slow or not served, divided by the share that the latency"
              " objective allows. At 1 the budget lasts exactly 30 days."),
        Panel("Failed requests", "percentunit",
              {'job:flashcore_failed_requests:ratio_rate5m{job=~"$job"}': "{{job}}"},
              "Share of requests that were refused, expired or failed. Errors of clients do not count."),
    ], [
        Panel("Connections", "short",
              {"flashcore_connections{<servers>}": "{{instance}} gRPC",
               "flashcore_local_connections{<servers>}": "{{instance}} local",
               "flashcore_local_rings{<servers>}": "{{instance}} local rings"},
              "Open connections, and the rings of those of the local socket."),
        Panel("Connections refused", "ops",
              {"sum by (reason) (rate(flashcore_connections_refused_total{<servers>}[<window>]))":
               "{{reason}}",
               "sum by (reason) (rate(flashcore_local_connections_refused_total{<servers>}[<window>]))":
               "local {{reason}}"},
              "Connections beyond a limit, closed for new ones, silent, or cut off as floods."),
        Panel("Callers refused", "ops",
              {"sum by (reason) (rate(flashcore_unauthenticated_total{<servers>}[<window>]))":
               "{{reason}}"},
              "Calls without a valid token or certificate, and streams of revoked tokens."),
        Panel("Certificate expires", "dateTimeFromNow",
              {"min(flashcore_tls_certificate_expiry_timestamp_seconds{<servers>}) * 1000": ""},
              "The server certificate that ends first; 1970 where a server has no TLS.", "stat"),
        Panel("Credentials not reloaded", "ops",
              {"sum by (credential) "
               "(rate(flashcore_credential_reload_failures_total{<servers>}[<window>]))":
               "{{credential}}"},
              "Changed certificate or token files that could not be used."),
    ], [
        Panel("CPU", "short", {"rate(process_cpu_seconds_total{<servers>}[<window>])": "{{instance}}"},
              "Cores in use."),
        Panel("Memory of the process", "bytes",
              {"process_resident_memory_bytes{<servers>}": "{{instance}} resident",
               "process_virtual_memory_bytes{<servers>}": "{{instance}} virtual"},
              "Host memory. GPU memory is not included."),
        Panel("Files and threads", "short",
              {"process_open_fds{<servers>}": "{{instance}} files",
               "process_max_fds{<servers>}": "{{instance}} files at most",
               "process_threads{<servers>}": "{{instance}} threads"},
              "Every connection is an open file."),
        Panel("Log records dropped", "short",
              {"rate(flashcore_log_records_dropped_total{<servers>}[<window>])": "{{instance}}"},
              "Per second: standard error did not take them in time."),
    ]])

TIME = dashboard(
    "flashcore-time", "FlashCore: Where time goes", "Phases of a request, the queue, the batches.",
    [*SERVERS, *RPC],
    [[
        Panel("Mean request, by phase", "s",
              {f"sum by (phase) (rate({PHASE}_sum{{{OF_RPC}}}[<window>]))"
               " / ignoring (phase) group_left "
               f'sum(rate({PHASE}_count{{{OF_RPC}, phase="receive"}}[<window>]))': "{{phase}}"},
              "Mean time of a request in each phase. Phases do not overlap.",
              stacked=True),
        Panel("p99 of each phase", "s", {quantile(0.99, PHASE, "phase", OF_RPC): "{{phase}}"},
              "p99 over the requests that reached the phase. The values do not add up."),
    ], [
        Panel("Queue", "short",
              {"sum by (device) (flashcore_queue_depth{<servers>})": "{{device}} waiting",
               "sum by (device) (flashcore_queue_capacity{<servers>})": "{{device}} at most"},
              "Requests waiting for a lane."),
        Panel("Wait in the queue", "s", _quantiles(PHASE, OF_RPC + ', phase="queue"'),
              "Time that a request waits in the queue for a lane."),
        Panel("Wait heatmap", "s",
              {_heat(PHASE, OF_RPC + ', phase="queue"'): "{{le}}"}, "Requests by waiting time.",
              "heatmap"),
    ], [
        Panel("Requests of a batch", "short",
              {mean("flashcore_batch_requests", "device"): "{{device}} mean",
               quantile(0.99, "flashcore_batch_requests", "device"): "{{device}} p99"},
              "Requests per launch."),
        Panel("Query rows of a batch", "short",
              {mean("flashcore_batch_query_rows", "device"): "{{device}} mean",
               quantile(0.99, "flashcore_batch_query_rows", "device"): "{{device}} p99"},
              "Query rows per launch."),
        Panel("Launches", "ops",
              {"sum by (device) (rate(flashcore_batch_requests_count{<servers>}[<window>]))":
               "{{device}}"},
              "Batches launched."),
    ]])

MEMORY = dashboard(
    "flashcore-memory", "FlashCore: Memory", "Resident K/V, the L2 window, staging memory.",
    SERVERS,
    [[
        Panel("K/V memory in use", "percentunit",
              {'sum by (device) (flashcore_kv_bytes{<servers>, state="used"})'
               " / sum by (device) (flashcore_kv_bytes{<servers>})": "{{device}}"},
              "Share of K/V memory that pages use.", "stat"),
        Panel("L2 window", "bytes",
              {"sum by (device) (flashcore_l2_window_bytes{<servers>})": "{{device}} window",
               "sum by (device) (flashcore_l2_persisting_bytes{<servers>})": "{{device}} set aside"},
              "K/V that the window of each lane covers, and L2 cache reserved for persisting lines.", "stat"),
    ], [
        Panel("K/V memory", "bytes",
              {"sum by (segment, state) (flashcore_kv_bytes{<servers>})": "{{segment}} {{state}}"},
              "Hot: the first bytes, which the L2 window covers. Cold: the rest.", stacked=True),
        Panel("Sequences", "short", {"sum by (device) (flashcore_sequences{<servers>})": "{{device}}"},
              "Resident sequences."),
        Panel("Evictions", "ops",
              {"sum by (reason) (rate(flashcore_sequences_evicted_total{<servers>}[<window>]))":
               "{{reason}}"},
              "Sequences that the server deleted: idle for too long (idle), to make room (lru), or "
              "because their lease ended (lease)."),
    ], [
        Panel("K/V read", "Bps",
              {"sum by (segment) (rate(flashcore_kv_read_bytes_total{<servers>}[<window>]))":
               "{{segment}}"},
              "Resident K/V that spans read. Shared K/V counts once for each span.", stacked=True),
        Panel("K/V moved", "Bps",
              {"sum by (to) (rate(flashcore_kv_moved_bytes_total{<servers>}[<window>]))": "to {{to}}"},
              "K/V moved to the hot or the cold segment."),
    ], [
        Panel("Staging memory", "bytes",
              {"sum by (state) (flashcore_staging_bytes{<servers>})": "{{state}}"},
              "Memory for tensors of requests in flight: used, or free for reuse.", stacked=True),
        Panel("Waiting for staging memory", "short",
              {"sum by (device) (flashcore_staging_waiting_requests{<servers>})": "{{device}}"},
              "Requests whose tensors the server does not receive yet: staging memory is full."),
        Panel("Shared memory", "bytes",
              {"sum(flashcore_shared_memory_bytes{<servers>})": "bytes"},
              "Client memory shared with the server."),
        Panel("Shared regions", "short",
              {"sum(flashcore_shared_memory_regions{<servers>})": "regions"},
              "Regions of client memory shared with the server."),
    ], [
        Panel("Device tensors", "bytes",
              {"sum(flashcore_device_tensor_bytes{<servers>})": "bytes"},
              "Device memory for tensors of clients (--local_device_tensors)."),
        Panel("Device tensor regions", "short",
              {"sum(flashcore_device_tensor_regions{<servers>})": "regions"},
              "Regions of device memory for tensors of clients."),
    ]])

GPU_DASHBOARD = dashboard(
    "flashcore-gpu", "FlashCore: GPU", "Metrics of NVIDIA's DCGM exporter, with its default counters.",
    [*SERVERS, *GPUS],
    [[
        Panel("Devices", "short",
              {"sum by (device, name, arch) (flashcore_device_info{<servers>})":
               "{{device}} {{name}} {{arch}}"},
              "Devices that servers compute on, and how many servers use each.", "stat"),
    ], [
        Panel("Utilisation", "percent",
              {f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}}": "{{Hostname}} {{gpu}} busy",
               f"DCGM_FI_DEV_MEM_COPY_UTIL{{{GPU}}}": "{{Hostname}} {{gpu}} memory"},
              "Share of time in which a kernel ran, and in which memory was read or written."),
        Panel("Engine, tensor cores and DRAM", "percentunit",
              {f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{GPU}}}": "{{Hostname}} {{gpu}} engine",
               f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{GPU}}}": "{{Hostname}} {{gpu}} tensor",
               f"DCGM_FI_PROF_DRAM_ACTIVE{{{GPU}}}": "{{Hostname}} {{gpu}} DRAM"},
              "Share of cycles. Decoding should be bound by DRAM."),
        Panel("PCIe", "Bps",
              {f"DCGM_FI_PROF_PCIE_RX_BYTES{{{GPU}}}": "{{Hostname}} {{gpu}} received",
               f"DCGM_FI_PROF_PCIE_TX_BYTES{{{GPU}}}": "{{Hostname}} {{gpu}} sent"},
              "Queries and new K/V come in, outputs go out. DCGM exports these as rates."),
    ], [
        Panel("GPU memory", "decmbytes",
              {f"DCGM_FI_DEV_FB_USED{{{GPU}}}": "{{Hostname}} {{gpu}} used",
               f"DCGM_FI_DEV_FB_FREE{{{GPU}}}": "{{Hostname}} {{gpu}} free"},
              "A server allocates its K/V memory at start."),
        Panel("Clocks", "rotmhz",
              {f"DCGM_FI_DEV_SM_CLOCK{{{GPU}}}": "{{Hostname}} {{gpu}} SM",
               f"DCGM_FI_DEV_MEM_CLOCK{{{GPU}}}": "{{Hostname}} {{gpu}} memory"},
              "An L4 lowers its SM clock to stay within its power limit."),
        Panel("Power", "watt", {f"DCGM_FI_DEV_POWER_USAGE{{{GPU}}}": "{{Hostname}} {{gpu}}"},
              "An L4's limit is 72 W."),
    ], [
        Panel("Temperature", "celsius",
              {f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}}": "{{Hostname}} {{gpu}} GPU",
               f"DCGM_FI_DEV_MEMORY_TEMP{{{GPU}}}": "{{Hostname}} {{gpu}} memory"},
              "Not every GPU reports its memory temperature."),
        Panel("Last Xid error", "short", {f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}": "{{Hostname}} {{gpu}}"},
              "0: no error since the driver was loaded."),
        Panel("PCIe replays", "ops",
              {f"rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}}[<window>])": "{{Hostname}} {{gpu}}"},
              "Retries on the PCIe link. A healthy link has none."),
    ]])

DASHBOARDS = (SERVICE, TIME, MEMORY, GPU_DASHBOARD)


def files():
    """The content of each file, by its path."""
    return {FOLDER / f"{board['uid']}.json": json.dumps(board, indent=2) + "\n"
            for board in DASHBOARDS}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
