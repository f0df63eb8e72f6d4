"""The seeds of the fuzzers of flags, .npy files and log records: bytes by name."""
import io
import struct

import numpy as np

# A value or more for each flag of the server; some are outside its limits.
FLAG_VALUES = {
    "listen": ("127.0.0.1:7070", "0.0.0.0:7070", "[::]:1", "localhost:1",
               "unix:/tmp/s", "[::1]:0", "a:1,b:2", "host", ":1", ""),
    "local_listen": ("/run/flashcore/local.sock", ""),
    "local_allow_overflow_uid": ("true", "maybe"),
    "insecure_listen": ("true", "maybe"),
    "tls_cert_file": ("/run/tls/tls.crt", ""),
    "tls_key_file": ("/run/tls/tls.key", ""),
    "tls_client_ca_file": ("", "/run/tls/ca.crt"),
    "token_file": ("/run/tokens", ""),
    "insecure_client_names": ("true", "maybe"),
    "trusted_proxies": ("cert:envoy,token:edge", "host:unix", "envoy", ""),
    "metrics_listen": ("127.0.0.1:9464", ""),
    "probe_listen": ("0.0.0.0:9465", ""),
    "metrics_token_file": ("/run/token",),
    "max_connections": ("1024", "0", "1048576"),
    "max_connections_per_host": ("256", "0", "1048576"),
    "max_connections_per_client": ("256", "0", "1048576"),
    "max_connection_streams": ("256", "0", "65536"),
    "handshake_timeout_s": ("10", "0", "nan"),
    "max_connection_age_s": ("0", "3600", "inf"),
    "enable_reflection": ("true", "no", "1", "maybe"),
    "drain_timeout_s": ("30", "500ms", "1h", "5x", "0", "1e300", "nan", "-1", "inf"),
    "unix_socket_mode": ("0660", "600", "0777", "1777", "0460", "9", "", "-660"),
    "unix_socket_group": ("0", "root", "4294967294", "4294967295", "-1", "no such group", ""),
    "max_queue_delay_us": ("0", "1000000", "9223372036854775807"),
    "device": ("auto", "cpu", "cuda:0", "cuda:0,cuda:1", "cuda:0,cuda:0", "cuda:-1", "cuda:"),
    "accumulate": ("float32", "float16", "float64"),
    "cpu_threads": ("0", "4096", "-1"),
    "lanes": ("1", "64", "0", "2147483647"),
    "idle_spin_us": ("0", "1000000000", "9223372036854775807"),
    "direct_io_bytes": ("0", "4294967296", "-9223372036854775808"),
    "l2_window": ("on", "off", "auto", "x"),
    "l2_budget_bytes": ("0", "1099511627776"),
    "pin_threads": ("", "0", "0-1", "1,0", "0-1023", "1-0", "0,0"),
    "kv_memory_bytes": ("0", "4194304", "549755813888", "1", "64MiB", "1.5GiB", "1e30TiB", "1 B"),
    "evict": ("none", "lru", "all"),
    "sequence_idle_timeout_s": ("0", "3600", "1e8", "1e300", "nan"),
    "sequence_metadata_bytes": ("1048576", "1"),
    "staging_memory_bytes": ("1048576", "70368744177664", "0"),
    "staging_wait_ms": ("0", "2s", "1us", "3600000", "2147483647"),
    "transport_memory_bytes": ("268435456", "2048", "9223372036854775807"),
    "shared_memory_bytes": ("4096", "1099511627776"),
    "local_device_tensors": ("true", "false", "maybe"),
    "device_tensor_bytes": ("0", "2097152", "1"),
    "max_message_bytes": ("1024", "2147483647", "4611686018427387904", "9223372036854775807"),
    "max_request_gflop": ("0", "0.001", "1e12", "1e308", "nan"),
    "max_launch_ms": ("1", "60000", "0"),
    "max_queue_requests": ("1", "1048576"),
    "client_kv_bytes": ("-1", "70368744177664"),
    "client_sequences": ("0", "2147483648"),
    "log_level": ("debug", "info", "warning", "error", "all"),
    "log_format": ("auto", "json", "text", "xml"),
}


def flags():
    """Each value in each form, and lists of lines."""
    inputs = {"nothing": b"", "stray": b".word", "no_bool": b"nenable_reflection\n!insecure_listen",
              "listen_twice": b"=listen=localhost:1\n,listen=unix:/b\n-listen=[::1]:2",
              "listen_in_both": b"elisten=localhost:1\n=listen=localhost:2",
              "the_last_counts": b"=lanes=2\n=lanes=3\nelanes=4"}
    for name, values in FLAG_VALUES.items():
        for i, value in enumerate(values):
            inputs[f"{name}_{i}"] = f"{'e=-,'[i % 4]}{name}={value}".encode()
        if values[0].isdigit():  # beyond the limits of most numbers
            for beyond in ("0", "-1", "9223372036854775807"):
                inputs[f"{name}_is_{beyond}"] = f"={name}={beyond}".encode()
    every = [f"={name}={values[0]}" for name, values in FLAG_VALUES.items()]
    for start in range(0, len(every), 14):
        inputs[f"several_{start}"] = "\n".join(every[start:start + 14]).encode()
    return inputs


def npy_bytes(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def npy_file(header, data=b"", version=1):
    """A file with a header of our own."""
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def npy():
    """Files that NumPy writes, and headers that it does not."""
    half = np.arange(12, dtype="<f2")
    good = npy_bytes(half.reshape(2, 3, 2))
    start = b"{'descr': '<f2', 'fortran_order': False, 'shape': "
    return {
        "f2": good, "f4": npy_bytes(np.ones((1, 2), "<f4")), "u2": npy_bytes(np.ones(3, "<u2")),
        "scalar": npy_bytes(np.float32(1)), "empty": npy_bytes(np.ones((0, 4), "<f2")),
        "version_2": npy_bytes(half, (2, 0)), "big_endian": npy_bytes(half.astype(">f2")),
        "version_3": npy_bytes(half, (3, 0)), "fortran": npy_bytes(np.asfortranarray(np.ones((2, 3)))),
        "fortran_f2": npy_bytes(np.asfortranarray(half.reshape(3, 4))),
        "f8": npy_bytes(np.ones(2)), "records": npy_bytes(np.zeros(1, "<f2,<f4")),
        "truncated": good[:-1], "too_long": good + b"x", "no_header": good[:8], "magic": good[:6],
        "other_order": npy_file(b'{"shape":(1,),"fortran_order":False,"descr":"<u2"}', b"12"),
        "overflow": npy_file(start + b"(4294967296, 4294967296, 2)}"),
        "overflow_and_0": npy_file(start + b"(18446744073709551615, 18446744073709551615, 0)}"),
        "negative": npy_file(start + b"(-1,)}"), "key_twice": npy_file(start + b"(), 'shape': ()}"),
        "not_closed": npy_file(start + b"(1"), "empty_header": npy_file(b""),
        "length_beyond_end": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    }


def token_file():
    """Lines that are right, and one fault each."""
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    other = "0" * 64
    texts = {
        "one": f"alice:{abc}:\n", "groups": f"alice:{abc}:a,b", "upper": f"a:{abc.upper()}:",
        "comments": f"# x\n\n  alice:{abc}:a\r\n\t#y", "empty": "", "no_token": "# x\n",
        "rotation": f"alice:{abc}:a\nalice:{other}:b", "same_token": f"a:{abc}:\nb:{abc}:",
        "no_name": f":{abc}:", "no_groups": f"a:{abc}", "four_fields": f"a:{abc}:b:c",
        "short": f"a:{abc[1:]}:", "long": f"a:{abc}0:", "no_hex": f"a:{abc[1:]}g:",
        "plain_token": "alice:secret:", "space": f"a b:{abc}:", "empty_group": f"a:{abc}:b,,c",
        "not_ascii": f"\u00e9:{abc}:", "nul": f"a\0b:{abc}:", "long_name": f"{'n' * 129}:{abc}:",
    }
    return {name: text.encode() for name, text in texts.items()}


def forwarded_client():
    """Headers that Envoy writes, and others."""
    texts = {
        "hash": "Hash=468ed33be74e", "uri": "By=spiffe://a;Hash=46;URI=spiffe://b",
        "subject": 'By=a;Hash=46;Subject="CN=Test Client,OU=Lyft\\, Inc";URI=;DNS=a.b;DNS=c',
        "two": "By=a;URI=b,By=b;URI=c", "quoted": r'URI="a,;=\"b"', "case": "uRi=a;DnS=b",
        "slashes": 'Subject="/C=US/CN=x"', "cert": 'Cert="-----BEGIN%20CERT-----%0A";Chain="x"',
        "hex": r'Subject="CN=a\2CCN=b\\"', "two_names": 'Subject="CN=a+CN=b"', "empty": "",
        "comma": ",", "open": 'URI="a', "open_escape": 'URI="a\\', "no_value": "URI",
        "key": "Key=a", "twice": "Hash=a;Hash=b", "spaces": "URI=a , DNS=b ; Hash=c", "end": "URI=a,",
        "inner_quote": 'URI=a"b"', "many": ",".join(["URI=a"] * 17), "equals": "URI=http://a?b=c",
    }
    return {name: text.encode() for name, text in texts.items()}


def log():
    """Strings that JSON must escape. FuzzedDataProvider takes numbers from the end of an input."""
    texts = {"plain": "word", "quotes": 'a "b" \\ c', "lines": "a\r\nb\u2028c", "empty": "",
             "terminal": "\x1b[2J\x07\x7f\u009b", "unicode": "\u00e9\U0001f600", "equals": "a=b c"}
    broken = {"not_utf8": b"\xff\xfe", "half_a_character": b"a\xe2\x82", "surrogate": b"\xed\xa0\x80",
              "overlong": b"\xc0\x80", "nul": b"a\0b"}
    strings = {**{name: text.encode() for name, text in texts.items()}, **broken}
    inputs = {}
    for name, text in strings.items():
        message = text.replace(b"\\", b"\\\\") + b"\\n"  # a backslash and a letter end a string
        for kind, numbers in (("small", bytes(32)), ("large", b"\xff" * 32)):
            inputs[f"{name}_{kind}"] = message + text + numbers
    return inputs
