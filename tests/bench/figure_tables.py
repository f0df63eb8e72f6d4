"""The tables of figures.py: each function of BLOCKS makes Markdown from the records."""


def why_not_one_run(record):
    """Why the parts of a record are not of one commit and machine; None if they are."""
    for what, value in (("commit", lambda run: run["commit"]),
                        ("CPU", lambda run: run["cpu"]),
                        ("GPU and driver", lambda run: [(gpu["name"], gpu["driver_version"])
                                                        for gpu in run["gpus"]])):
        values = {name: value(part["run"]) for name, part in record.items()}
        if any(other != next(iter(values.values())) for other in values.values()):
            return f"its parts differ in the {what}: {values}"
    if any(part["run"]["commit"].endswith("-dirty") for part in record.values()):
        return "it was measured with changes that no commit has"
    return None


def table(columns, rows, numbers=0):
    """A Markdown table; the last `numbers` columns are aligned to the right."""
    marks = ["---"] * (len(columns) - numbers) + ["---:"] * numbers
    lines = [columns, marks, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def day(run):
    return run["date"][:10]


def machine(run):
    """One sentence: GPU, driver and clocks, or CPU; date and commit."""
    if run["gpus"]:
        gpu = run["gpus"][0]
        where = (f"{gpu['name']}, driver {gpu['driver_version']}, clocks up to "
                 f"{gpu['clocks.max.sm']} MHz (SM) and {gpu['clocks.max.mem']} MHz (memory), "
                 f"{run['cpu']['cores']} CPU cores")
    else:
        where = f"{run['cpu']['model']}, {run['cpu']['cores']} cores"
    return f"{where}; {day(run)}, commit {run['commit']}"


def model(record):
    """The GPU's model, `H100` of `NVIDIA H100 80GB HBM3`; `CPU` for a record of a CPU."""
    gpus = record["server"]["run"]["gpus"]
    return gpus[0]["name"].removeprefix("NVIDIA ").split()[0] if gpus else "CPU"


def us(value):
    """A time with three digits or more."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(theirs, ours):
    """Our speed relative to theirs."""
    return "-" if theirs is None else f"{theirs / ours:.2f}x"


def kernel_results(records, tool, kind="float16", sums="float32", kv=""):
    """A tool's results for a kind of kernel, {(shape, l2): result}, in the record's order. `kv`: 8-bit K/V
    and, if they are not of 16 bits, the products: `int8_int8_qk`."""
    ends = f"_{sums}_kv_{kv}" if kv else f"_{sums}"
    return {(result["shape"], result["l2"]): result
            for result in records["gpu"]["kernels"]["results"]
            if result["tool"] == tool and f"_{kind}_" in result["kernel"]
            and result["kernel"].endswith(ends)}


def beside_torch(records):
    """FP16 results beside PyTorch."""
    return kernel_results(records, "compare_torch.py")


def alone(records, **kind):
    """Results of a kind of kernel alone on the GPU; `kind` as for kernel_results."""
    return kernel_results(records, "flashcore-kernel-bench", **kind)


def kernels(records):
    """Every named shape, FP16, beside PyTorch's backends."""
    part = records["gpu"]["kernels"]
    rows = []
    for (shape, l2), result in beside_torch(records).items():
        flash, cudnn = result["torch_flash_us"], result["torch_cudnn_us"]
        rows.append((f"`{shape}`", l2, us(result["us"]), us(flash), us(cudnn),
                     times(flash, result["us"]), times(cudnn, result["us"]),
                     f"{result['tflops']:.1f}", f"{result['gbps']:.0f}",
                     f"{result['max_err']:.0e}"))
    columns = ("shape", "L2", "ours, us", "FLASH", "cuDNN", "FLASH / ours", "cuDNN / ours",
               "TFLOP/s", "GB/s", "max error")
    return (f"{machine(part['run'])}. PyTorch {part['torch']['torch']}, cuDNN "
            f"{part['torch']['cudnn']}. In the same run a matmul reached "
            f"{part['torch']['matmul_tflops']:.0f} TFLOP/s and a copy "
            f"{part['torch']['copy_gbps']:.0f} GB/s.\n\n" + table(columns, rows, 8))


def kernel_kinds(records):
    """Other kinds of kernels against FP16 with float32 sums, each alone on the GPU, cold L2."""
    base = alone(records)
    kinds = {"BF16": alone(records, kind="bfloat16"), "float16 sums": alone(records, sums="float16")}
    rows = [(f"`{shape}`", us(result["us"]),
             *(f"{us(kind[shape, l2]['us'])} ({times(result['us'], kind[shape, l2]['us'])})"
               for kind in kinds.values()))
            for (shape, l2), result in base.items() if l2 == "cold"]
    return table(("shape", "FP16, us", *(f"{kind}, us (speed)" for kind in kinds)), rows,
                 1 + len(kinds))


def kernels_8bit(records):
    """8-bit K/V beside FP16 K/V, each alone on the GPU, and PyTorch's backends over FP16 K/V, cold L2."""
    kinds = {"FP16 K/V": "", "INT8, 16-bit products": "int8", "`int8_qk`": "int8_int8_qk",
             "`int8_qk_pv`": "int8_int8_qk_pv", "E4M3": "float8_e4m3"}
    ours = [alone(records, kv=kv) for kv in kinds.values()]
    torch = beside_torch(records)
    rows = [(f"`{shape}`", *(us(results[shape, l2]["us"]) for results in ours),
             us(torch[shape, l2]["torch_flash_us"]), us(torch[shape, l2]["torch_cudnn_us"]))
            for shape, l2 in ours[0] if l2 == "cold"]
    return (f"{machine(records['gpu']['kernels']['run'])}. Times in us.\n\n" +
            table(("shape", *kinds, "FLASH", "cuDNN"), rows, len(kinds) + 2))


def float16_sums(records):
    """One sentence: the range of speeds of float16 sums over float32 sums."""
    base, half = (alone(records, sums=sums) for sums in ("float32", "float16"))
    speeds = sorted((result["us"] / half[key]["us"], key[0])
                    for key, result in base.items() if key[1] == "cold")
    (least, slowest), (most, fastest) = speeds[0], speeds[-1]
    gpu = records["gpu"]
    return (f"On an {model(gpu)} ({day(gpu['kernels']['run'])}) kernels with float16 sums run at "
            f"{least:.2f}x (`{slowest}`) to {most:.2f}x (`{fastest}`) of the speed of those with "
            f"float32 sums.")


CASES = {"mission": "1x8x512x64, K/V inline", "decode1": "decode step, 1 sequence of 4096 rows",
         "decode64": "decode step, 64 sequences of 4096 rows",
         "decode1_512": "decode step, 1 sequence of 512 rows",
         "decode64_512": "decode step, 64 sequences of 512 rows"}
TRANSPORTS = {"tcp": "TCP", "unix": "Unix socket", "local": "local socket"}


def server_rows(record, section, **fields):
    """The rows of a section of record_server.py with these fields."""
    part = record["tuning" if section == "tuning" else "server"]
    return [row for row in part["results"]["rows"]
            if row["section"] == section and row.get("transport", "tcp") in TRANSPORTS and
            all(row.get(k) == v for k, v in fields.items())]


def server_row(record, section, **fields):
    """The only such row."""
    rows = server_rows(record, section, **fields)
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows of section {section} with {fields}")
    return rows[0]


def cells_of(rows, *keys):
    """(case, clients, ...) of rows, each once, in their order."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def spread(row, key, show):
    """The median of the rounds, and behind it the least and the greatest."""
    if row.get(key) is None:
        return "-"
    return f"{show(row[key])} ({show(row[key + '_min'])}..{show(row[key + '_max'])})"


def count(value):
    return f"{value:,.0f}"


def ratio(value):
    return f"{value:.2f}"


def rate(row):
    """`p50 2.9 ms, 5,356 requests/s`."""
    return f"{us(row['p50_us'])} us, {count(row['requests_per_second'])} requests/s"


def best_peer(record, case, clients):
    """The peer's variant with the most requests a second."""
    rows = [row for row in server_rows(record, "peer", case=case, clients=clients)
            if row["variant"] != "flashcore"]
    return max(rows, key=lambda row: row["requests_per_second"])


def headline_kernels(records):
    """Rows (what, measured, against) of the CUDA kernels."""
    results, rows = beside_torch(records), []
    gpu = model(records["gpu"])
    for shape, text in (("mission", "1x8x512x64"), ("b8", "8x8x512x64"),
                        ("prefill", "causal, 8192 rows, 32 heads over 8, head_dim 128"),
                        ("decode1", "decode, 1 x 4096 rows, 32 heads over 8, head_dim 128"),
                        ("decode64", "the same decode, 64 sequences")):
        cold, warm = results[shape, "cold"], results.get((shape, "warm"))
        measured = f"{us(cold['us'])} us" + (f"; L2 warm {us(warm['us'])} us" if warm else "")
        rows.append((f"{gpu} kernel: {text}", measured,
                     f"{times(cold['torch_flash_us'], cold['us'])} FLASH's speed, "
                     f"{times(cold['torch_cudnn_us'], cold['us'])} cuDNN's"))
    fp16, int8 = (alone(records, kv=kv)["decode64", "cold"]["us"] for kv in ("", "int8"))
    rows.append((f"{gpu} kernel: the same decode, INT8 K/V", f"{us(int8)} us",
                 f"{times(fp16, int8)} the speed over FP16 K/V"))
    return rows


def headline_server(record):
    """Rows (what, measured, against) of the server on a GPU."""
    rows = []
    for case, clients in (("mission", 1), ("mission", 16), ("decode1", 1), ("decode1", 16),
                          ("decode64", 1)):
        ours = server_row(record, "peer", case=case, clients=clients, variant="flashcore")
        peer = server_row(record, "peer", case=case, clients=clients, variant="peer")
        best = best_peer(record, case, clients)
        against = f"peer: {rate(peer)}"
        if best is not peer:
            against += f"; with 8 processes: {rate(best)}"
        rows.append((f"{model(record)} server, TCP, {clients} client{'s' * (clients > 1)}: {CASES[case]}",
                     rate(ours), against))
    for case in ("mission", "decode1"):
        local, tcp = (server_row(record, "transports", case=case, clients=1, echo=False,
                                 variant=f"{over}_unary") for over in ("local", "tcp"))
        rows.append((f"{model(record)} server, local socket: {CASES[case]}",
                     f"{us(local['p50_us'])} us, of which kernel {us(local['kernel_p50_us'])} us",
                     f"over TCP: {us(tcp['p50_us'])} us"))
    return rows


def headline_cpu(record):
    """Rows (what, measured, against) on the CPU."""
    cores = record["server"]["run"]["cpu"]["cores"]
    step = server_row(record, "cpu", case="decode64_512")
    rows = [(f"CPU server ({cores} cores): {CASES['decode64_512']}, K/V resident",
             f"{us(step['p50_us'])} us, {count(step['request_bytes'] / 1000)} kB sent",
             f"K/V inline: {us(step['inline_p50_us'])} us, "
             f"{count(step['inline_request_bytes'] / 1e6)} MB sent")]
    for run in record["kernels"]["results"]["runs"]:
        shape = "1x8x512x64"
        ours = run["contenders"][f"flashcore_f16_{shape}"]
        ratios = run["ratios"][shape]
        rows.append((f"CPU kernel ({run['threads']} thread{'s' * (run['threads'] > 1)}): {shape}",
                     f"{us(ours['median_seconds'] * 1e6)} us",
                     f"{ratios['speed_over_torch_median']:.2f}x PyTorch float32's speed; "
                     f"{ratios['fraction_of_sgemm_median']:.0%} of OpenBLAS SGEMM's rate"))
    return rows


def how_fast(records):
    """The README's table."""
    rows = [*headline_kernels(records), *headline_server(records["gpu"]),
            *headline_cpu(records["cpu"])]
    return (table(("FP16", "measured", "beside it, in the same run"), rows) +
            f"\n\n{model(records['gpu'])}: {machine(records['gpu']['server']['run'])}.\n"
            f"CPU: {machine(records['cpu']['server']['run'])}.")


def beside_peer(records):
    """Every cell beside the Python server, one request per client at a time, TCP."""
    record, rows = records["gpu"], []
    variants = list(dict.fromkeys(row["variant"] for row in server_rows(record, "peer")))
    for case, clients in cells_of(server_rows(record, "peer"), "case", "clients"):
        for variant in variants:
            for row in server_rows(record, "peer", case=case, clients=clients, variant=variant):
                rows.append((CASES[case], clients, f"`{variant}`", spread(row, "p50_us", us),
                             us(row["p99_us"]), spread(row, "requests_per_second", count)))
    return (f"{machine(record['server']['run'])}.\n\n" +
            table(("case", "clients", "server", "p50, us", "p99, us", "requests/s"), rows, 3))


def beside_echo(records, name, section):
    """One client, each transport, beside an echo of the same bytes."""
    record, rows = records[name], []
    for row in server_rows(record, section):
        if "echo_p50_us" in row:
            rows.append((CASES[row["case"]], TRANSPORTS[row["transport"]],
                         "`AttendStream`" if row["stream"] else "`Attend`",
                         spread(row, "p50_us", us), us(row["kernel_p50_us"]),
                         us(row["echo_p50_us"]),
                         spread(row, "outside_kernel_over_echo", ratio),
                         spread(row, "latency_over_echo_and_kernel", ratio)))
    return (f"{machine(record['server']['run'])}.\n\n" +
            table(("case", "over", "call", "p50, us", "kernel, us", "echo, us",
                   "outside the kernel / echo", "p50 / (echo + kernel)"), rows, 5))


def transports(records):
    """Without an echo: the transports beside each other."""
    rows = []
    for name, section in (("gpu", "transports"), ("cpu", "cpu")):
        for row in server_rows(records[name], section):
            if "echo_p50_us" not in row and "inline_p50_us" not in row:
                rows.append((model(records[name]), CASES[row["case"]], row["clients"],
                             TRANSPORTS[row["transport"]], spread(row, "p50_us", us),
                             spread(row, "requests_per_second", count),
                             spread(row, "p50_over_baseline", ratio)))
    return table(("on", "case", "clients", "over", "p50, us", "requests/s", "p50 / that of TCP"),
                 rows, 4)


def tuning(records):
    """Flags of a GPU server against their defaults."""
    rows = []
    for row in server_rows(records["gpu"], "tuning"):
        if row["variant"] != row["baseline"]:
            default = row["baseline"].partition("=")[2]
            rows.append((f"`{row['variant']}`", default, CASES[row["case"]], row["clients"],
                         spread(row, "p50_over_baseline", ratio),
                         spread(row, "requests_per_second_over_baseline", ratio)))
    return (f"{machine(records['gpu']['server']['run'])}.\n\n" +
            table(("flag", "default", "case", "clients", "p50 / the default's",
                   "requests/s / the default's"), rows, 3))


def l2_window(records):
    """Decode over hot K/V with a window over it, against the same without one."""
    part = records["gpu"]["l2_window"]
    rows = []
    keys = ("hot_bytes", "background_share", "cold", "cold_bytes")
    for row in part["results"]["rows"]:
        if row["window"] == "with":
            without = next(r for r in part["results"]["rows"]
                           if r["window"] in ("without", "alone")
                           and all(r.get(key) == row.get(key) for key in keys))
            where = {"none": "alone"}.get(row["cold"], row["cold"])
            if row.get("background_share", 0) > 0:
                where += f", background {row['background_share']:.0%}"
            distance = f"{row['cold_bytes'] >> 20} MiB" if row["cold_bytes"] else "-"
            rows.append((f"{row['hot_bytes'] >> 20} MiB", where, distance, us(without["p50_us"]),
                         us(row["p50_us"]),
                         spread(row, "change_percent", lambda value: f"{value:+.1f}%")))
    return (f"{machine(part['run'])}.\n\n" +
            table(("hot K/V", "cold K/V", "read between", "without, us", "with, us",
                   "change of the time"), rows, 3))


BLOCKS = {"how-fast": how_fast, "kernels": kernels, "kernel-kinds": kernel_kinds,
          "kernels-8bit": kernels_8bit, "float16-sums": float16_sums, "beside-peer": beside_peer,
          "beside-echo": lambda records: beside_echo(records, "gpu", "transports"),
          "beside-echo-cpu": lambda records: beside_echo(records, "cpu", "cpu"),
          "transports": transports, "tuning": tuning, "l2-window": l2_window}
