# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror against the header itself, and what loading refuses."""

import ctypes
import shutil
import subprocess

import pytest
from conftest import ROOT

from bitdecoding_vllm import library

STRUCTS = {
    "bd_runtime_options": library.RuntimeOptions,
    "bd_page_info": library.PageInfo,
    "bd_layer_options": library.LayerOptions,
    "bd_steps_options": library.StepsOptions,
    "bd_step_input": library.StepInput,
    "bd_tensor": library.Tensor,
    "bd_cache": library.Cache,
    "bd_write_params": library.WriteParams,
    "bd_attend_params": library.AttendParams,
    "bd_cuda_steps_options": library.CudaStepsOptions,
    "bd_cuda_memory": library.CudaMemory,
    "bd_gather_params": library.GatherParams,
    "bd_merge_params": library.MergeParams,
    "bd_counters": library.Counters,
}


@pytest.fixture(scope="module")
def compiler():
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return name
    pytest.fail("there is no C compiler (cc, gcc or clang), which building the library needs too")


def run_c(compiler, folder, source, *flags):
    file, program = folder / "program.c", folder / "program"
    file.write_text(source)
    command = [compiler, "-std=c11", f"-I{ROOT / 'include'}", *flags, str(file), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def test_structs_equal_the_header(compiler, tmp_path):
    lines = ['  printf("ABI %d\\n", BD_ABI_VERSION);']
    for name, struct in STRUCTS.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            lines.append(
                f'  printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name}*)0)->{field}));"
            )
    body = "\n".join(lines)
    source = (
        "#include <stddef.h>\n#include <stdio.h>\n#include <bitdecoding/bitdecoding.h>\n"
        f"int main(void) {{\n{body}\n  return 0;\n}}\n"
    )
    program = run_c(compiler, tmp_path, source)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    expected = [f"ABI {library.ABI_VERSION}"]
    for name, struct in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            member = getattr(struct, field)
            expected.append(f"{name}.{field} {member.offset} {member.size}")
    assert printed.splitlines() == expected


def test_status_codes_become_sentences():
    lib = library.load()
    options = library.sized(library.RuntimeOptions, recipe_json=b'{"mode": "no-such-mode"}')
    with pytest.raises(library.BitdecodingError, match="no-such-mode"):
        lib.create(lib.bd_runtime_create, None, options)


def test_a_struct_of_another_size_is_refused():
    lib = library.load()
    options = library.RuntimeOptions(struct_size=ctypes.sizeof(library.RuntimeOptions) - 8)
    with pytest.raises(library.BitdecodingError, match="struct_size"):
        lib.create(lib.bd_runtime_create, None, options)


def test_another_abi_is_refused(compiler, tmp_path, monkeypatch):
    source = "int bd_abi_version(void) { return 99; }"
    program = run_c(compiler, tmp_path, source, "-shared", "-fPIC")
    monkeypatch.setenv(library.ENV_LIBRARY, str(program))
    with pytest.raises(library.LibraryError, match="has ABI 99, but this plugin speaks ABI"):
        library.load()


def test_a_library_of_something_else_is_refused(compiler, tmp_path, monkeypatch):
    program = run_c(compiler, tmp_path, "int other(void) { return 1; }", "-shared", "-fPIC")
    monkeypatch.setenv(library.ENV_LIBRARY, str(program))
    with pytest.raises(library.LibraryError, match="not the bitdecoding library"):
        library.load()


def test_a_file_that_is_no_library_is_refused(tmp_path, monkeypatch):
    path = tmp_path / library.FILE_NAME
    path.write_text("version https://git-lfs.github.com/spec/v1")
    monkeypatch.setenv(library.ENV_LIBRARY, str(path))
    with pytest.raises(library.LibraryError, match="could not be loaded"):
        library.load()


def test_a_missing_library_names_where_it_was_sought(tmp_path, monkeypatch):
    path = tmp_path / "nowhere.so"
    monkeypatch.setenv(library.ENV_LIBRARY, str(path))
    with pytest.raises(library.LibraryError, match=str(path)):
        library.load()
