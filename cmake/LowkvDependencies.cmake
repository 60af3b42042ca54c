# What deps/setup.py has put into its cache, and which parts of the build that allows.
# The core library needs nothing. A path may also be given with -D, which wins.

if(DEFINED ENV{LOWKV_CACHE_DIR})
    set(LOWKV_CACHE_DIR "$ENV{LOWKV_CACHE_DIR}")
else()
    set(LOWKV_CACHE_DIR "$ENV{HOME}/.cache/lowkv")
endif()
set(LOWKV_DEPS_FILE "${LOWKV_CACHE_DIR}/deps.cmake")

if(EXISTS "${LOWKV_DEPS_FILE}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${LOWKV_DEPS_FILE}")
    # Scoped, so that a -D on the command line wins over the file.
    function(lowkv_read_dependencies)
        include("${LOWKV_DEPS_FILE}")
        foreach(name LLAMA_SOURCE LLAMA_BUILD GGML_VERSION MODEL DEMO_TEXT HEADERS PYTHON)
            if(name STREQUAL "LLAMA_BUILD" AND WIN32)
                set(LOWKV_${name} "${LOWKV_LLAMA_WINDOWS}")
            elseif(name STREQUAL "LLAMA_BUILD" AND APPLE AND CMAKE_CROSSCOMPILING)
                set(LOWKV_${name} "${LOWKV_MACOS}/llama_cpp_py_sync")
            endif()
            if(DEFINED LOWKV_${name} AND NOT DEFINED CACHE{LOWKV_${name}})
                set(LOWKV_${name} "${LOWKV_${name}}" PARENT_SCOPE)
            endif()
        endforeach()
    endfunction()
    lowkv_read_dependencies()
endif()

if(LOWKV_LLAMA_SOURCE AND LOWKV_LLAMA_BUILD AND LOWKV_GGML_VERSION)
    set(lowkv_have_llama ON)
else()
    set(lowkv_have_llama OFF)
endif()
if(LOWKV_HEADERS)
    set(lowkv_have_headers ON)
else()
    set(lowkv_have_headers OFF)
endif()
if(lowkv_have_llama AND lowkv_have_headers)
    set(lowkv_have_both ON)
else()
    set(lowkv_have_both OFF)
endif()

option(LOWKV_GUESTS "Build guests/: SKVQ, KVQuant, calibrations and filters" ON)

# Not options, which would keep what the first run of the set-up allowed. -D sets any of them.
function(lowkv_default name value)
    if(NOT DEFINED ${name})
        set(${name} ${value} PARENT_SCOPE)
    endif()
endfunction()
if(LOWKV_GUESTS)
    lowkv_default(LOWKV_BUILD_PLUGIN ${lowkv_have_llama}) # the llama.cpp plug-in, which reads calibrations
    lowkv_default(LOWKV_BUILD_CLI ${lowkv_have_both})     # the command lowkv, which needs the plug-in
elseif(LOWKV_BUILD_PLUGIN OR LOWKV_BUILD_CLI)
    message(FATAL_ERROR "LOWKV_BUILD_PLUGIN and LOWKV_BUILD_CLI need LOWKV_GUESTS")
endif()
lowkv_default(LOWKV_BUILD_TESTS ${lowkv_have_headers}) # the C++ tests and examples
set(LOWKV_CORE "" CACHE PATH "A build folder of these sources whose core is taken, not compiled again")
option(LOWKV_BUILD_PYTHON "Build the Python extension (pip does: see pyproject.toml)" OFF)
option(LOWKV_BUILD_PYTHON_CUDA "Build the extension of lowkv-cuda (pip does: see python/cuda/pyproject.toml)" OFF)
option(LOWKV_FUZZ "Build the fuzz targets, with clang (the preset fuzz)" OFF)
option(LOWKV_PORTABLE "For other machines (deps/dist.py): no path of this one is remembered" OFF)
option(LOWKV_LINK_CHECK "Let the linker find all that the plug-in takes from ggml" ON)
option(LOWKV_WERROR "Treat warnings in lowkv's own code as errors" ON)

if(NOT lowkv_have_llama OR NOT lowkv_have_headers)
    message(STATUS "lowkv: no complete set of dependencies in ${LOWKV_CACHE_DIR}; "
                   "for the plug-in, the command and the tests run: python3 deps/setup.py")
endif()
if(LOWKV_BUILD_CLI AND NOT LOWKV_BUILD_PLUGIN)
    message(FATAL_ERROR "LOWKV_BUILD_CLI needs LOWKV_BUILD_PLUGIN")
endif()
if((LOWKV_BUILD_PLUGIN OR LOWKV_BUILD_CLI) AND NOT lowkv_have_llama)
    message(FATAL_ERROR "The plug-in needs llama.cpp: run python3 deps/setup.py llama, "
                        "or set LOWKV_LLAMA_SOURCE, LOWKV_LLAMA_BUILD and LOWKV_GGML_VERSION")
endif()
if((LOWKV_BUILD_CLI OR LOWKV_BUILD_TESTS) AND NOT lowkv_have_headers)
    message(FATAL_ERROR "CLI11 and doctest are needed: run python3 deps/setup.py headers, "
                        "or set LOWKV_HEADERS to the folder that has CLI/ and doctest/")
endif()

# llama.cpp as imported targets: only what is linked, and its headers as system headers.
if(lowkv_have_llama)
    find_package(OpenMP REQUIRED COMPONENTS CXX)
    foreach(library ggml-base ggml-cpu ggml llama)
        add_library(llamacpp::${library} SHARED IMPORTED)
        set_target_properties(llamacpp::${library} PROPERTIES
            INTERFACE_INCLUDE_DIRECTORIES "${LOWKV_LLAMA_SOURCE}/ggml/include")
        if(WIN32) # MinGW's linker needs no import library beside a DLL
            string(REGEX REPLACE "^llama$" "libllama" file ${library})
            set_target_properties(llamacpp::${library} PROPERTIES
                IMPORTED_IMPLIB "${LOWKV_LLAMA_BUILD}/${file}.dll")
        elseif(APPLE)
            set_property(TARGET llamacpp::${library} PROPERTY
                IMPORTED_LOCATION "${LOWKV_LLAMA_BUILD}/lib${library}.dylib")
        else()
            set_target_properties(llamacpp::${library} PROPERTIES
                IMPORTED_LOCATION "${LOWKV_LLAMA_BUILD}/lib${library}.so" IMPORTED_SONAME "lib${library}.so.0")
        endif()
    endforeach()
    # The plug-in does without: deps/plugin_for.py may have no more than ggml's headers.
    set_property(TARGET llamacpp::llama APPEND PROPERTY
        INTERFACE_INCLUDE_DIRECTORIES "${LOWKV_LLAMA_SOURCE}/include")
    set_property(TARGET llamacpp::ggml PROPERTY INTERFACE_LINK_LIBRARIES llamacpp::ggml-base)
    set_property(TARGET llamacpp::llama PROPERTY INTERFACE_LINK_LIBRARIES llamacpp::ggml)
    # The one private header that a backend needs: ggml-backend-impl.h.
    add_library(llamacpp::backend-headers INTERFACE IMPORTED)
    set_property(TARGET llamacpp::backend-headers PROPERTY
        INTERFACE_INCLUDE_DIRECTORIES "${LOWKV_LLAMA_SOURCE}/ggml/src")
endif()

# OpenCL devices (docs/devices.md): only where they are asked for, so that a build does not depend on what lies about.
option(LOWKV_OPENCL "Build lowkv::opencl" OFF)
if(LOWKV_OPENCL)
    find_package(OpenCL QUIET)
    if(NOT OpenCL_FOUND)
        message(FATAL_ERROR "LOWKV_OPENCL needs OpenCL's headers and its loader, libOpenCL.so; "
                            "on Debian: apt-get install opencl-c-headers ocl-icd-opencl-dev")
    endif()
endif()
option(LOWKV_CUDA "Build lowkv::cuda" OFF)
if(LOWKV_CUDA)
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND)
        message(FATAL_ERROR "LOWKV_CUDA needs the CUDA toolkit (12.8 or newer), with nvcc")
    endif()
endif()
option(LOWKV_CUDA_TESTS "Test lowkv::cuda on the device that LOWKV_TEST_CUDA names" OFF)
if(LOWKV_CUDA_TESTS AND NOT (LOWKV_CUDA AND LOWKV_BUILD_TESTS))
    message(FATAL_ERROR "LOWKV_CUDA_TESTS needs LOWKV_CUDA and LOWKV_BUILD_TESTS")
endif()
option(LOWKV_OPENCL_TESTS "Test lowkv::opencl on the device that LOWKV_TEST_OPENCL names" OFF)
if(LOWKV_OPENCL_TESTS AND NOT (LOWKV_OPENCL AND LOWKV_BUILD_TESTS))
    message(FATAL_ERROR "LOWKV_OPENCL_TESTS needs LOWKV_OPENCL and LOWKV_BUILD_TESTS")
endif()
