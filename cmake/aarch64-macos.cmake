# macOS with Apple's processors by zig's clang (LOWKV_ZIG: its file), which brings libSystem's stubs, headers and libc++.
# What it builds can be run on no machine of ours.
# For modules CMake says -bundle, from which zig makes a program. It says so after this file, which is read once more.
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
set(CMAKE_SHARED_MODULE_CREATE_CXX_FLAGS "-dynamiclib")
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LOWKV_ZIG)
foreach(language C CXX)
    set(CMAKE_${language}_COMPILER_TARGET aarch64-macos)
endforeach()
set(CMAKE_C_COMPILER "${LOWKV_ZIG}")
set(CMAKE_C_COMPILER_ARG1 cc)
set(CMAKE_CXX_COMPILER "${LOWKV_ZIG}")
set(CMAKE_CXX_COMPILER_ARG1 c++)
set(CMAKE_OSX_SYSROOT "")
set(CMAKE_INSTALL_NAME_TOOL "${LOWKV_ZIG}") # asked for, and not called unless something is installed
# Its archiver is a subcommand, too.
set(CMAKE_AR "${LOWKV_ZIG}")
set(CMAKE_RANLIB "${LOWKV_ZIG}")
foreach(language C CXX)
    set(CMAKE_${language}_ARCHIVE_CREATE "<CMAKE_AR> ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
    set(CMAKE_${language}_ARCHIVE_APPEND "<CMAKE_AR> ar q <TARGET> <LINK_FLAGS> <OBJECTS>")
    set(CMAKE_${language}_ARCHIVE_FINISH "<CMAKE_RANLIB> ranlib <TARGET>")
endforeach()
# OpenMP by LLVM's library, with GCC's header, which declares what the standard says.
set(OpenMP_CXX_FLAGS "-fopenmp=libomp" CACHE STRING "")
set(OpenMP_CXX_LIB_NAMES omp CACHE STRING "")
set(OpenMP_omp_LIBRARY "${LOWKV_MACOS}/faiss/.dylibs/libomp.dylib" CACHE FILEPATH "" FORCE)
execute_process(COMMAND g++ -print-file-name=include/omp.h OUTPUT_VARIABLE header OUTPUT_STRIP_TRAILING_WHITESPACE)
file(COPY "${header}" DESTINATION "${CMAKE_BINARY_DIR}/openmp")
set(OpenMP_CXX_INCLUDE_DIR "${CMAKE_BINARY_DIR}/openmp" CACHE PATH "")
