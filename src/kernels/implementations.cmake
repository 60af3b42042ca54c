# The implementations of the kernels, best first; the build, select.cpp and the tests go by this
# list alone. A row names a folder here and the macro that compilers for its CPUs define; one
# without a macro is for all CPUs.
set(rows
    "amx __x86_64__"
    "avx512_vbmi __x86_64__"
    "avx512 __x86_64__"
    "avx_vnni __x86_64__"
    "avx2 __x86_64__"
    "neon_i8mm __aarch64__"
    "neon __aarch64__"
    "scalar")

include(CheckCXXSymbolExists)
set(LOWKV_LEFT_OUT "" CACHE STRING "Implementations that are not built, where compiling them takes too long")
set(LOWKV_IMPLEMENTATIONS)  # those that this compiler compiles
foreach(row ${rows})
    separate_arguments(row)
    list(POP_FRONT row name)
    if(name IN_LIST LOWKV_LEFT_OUT)
        continue()
    endif()
    if(row)
        check_cxx_symbol_exists(${row} cstddef LOWKV_HAVE_${row})
        if(NOT LOWKV_HAVE_${row})
            continue()
        endif()
    endif()
    list(APPEND LOWKV_IMPLEMENTATIONS ${name})
endforeach()
unset(rows)
