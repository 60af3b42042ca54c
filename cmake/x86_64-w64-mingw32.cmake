# 64-bit Windows by Debian's MinGW-w64 (g++-mingw-w64-x86-64-posix); what it builds runs under wine64.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_RC_COMPILER x86_64-w64-mingw32-windres)
set(CMAKE_CROSSCOMPILING_EMULATOR /usr/lib/wine/wine64)
set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)

# The stack is aligned to 16 bytes only, also where GCC keeps AVX registers in it (GCC bug 54412): the assembler turns
# aligned vector moves into unaligned ones, which are as fast on aligned addresses.
foreach(language C CXX)
    set(CMAKE_${language}_FLAGS_INIT "-Wa,-muse-unaligned-vector-move")
endforeach()
# Each program and DLL has the compiler's libraries inside, and shows none of them: Windows does not look for libraries
# beside a plug-in.
set(inside libgcc.a:libgcc_eh.a:libstdc++.a:libgomp.a:libpthread.a:libwinpthread.a)
foreach(kind EXE SHARED MODULE)
    set(CMAKE_${kind}_LINKER_FLAGS_INIT "-static -Wl,--exclude-libs,${inside}")
endforeach()
foreach(library gomp mingwthrd)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=lib${library}.a
        OUTPUT_VARIABLE file OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(OpenMP_${library}_LIBRARY "${file}" CACHE FILEPATH "")
endforeach()
