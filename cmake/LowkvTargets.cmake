# Compiler settings of lowkv's own code, and the helper that lists a folder's sources.

add_library(lowkv_settings INTERFACE)
target_compile_options(lowkv_settings INTERFACE
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Wold-style-cast
    # Codes must be bit-identical between implementations: no fused multiply-add unless it is written.
    -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # False alarms of GCC: attributes of __m512i as a template argument (nothing is lost there), and
    # std::string's operator+ (GCC bug 105651).
    target_compile_options(lowkv_settings INTERFACE -Wno-ignored-attributes -Wno-restrict)
else()
    # Clang's -Wconversion also means signs.
    target_compile_options(lowkv_settings INTERFACE -Wno-sign-conversion)
endif()
if(WIN32)
    target_compile_definitions(lowkv_settings INTERFACE NOMINMAX WIN32_LEAN_AND_MEAN) # of what windows.h brings
endif()
if(LOWKV_WERROR)
    target_compile_options(lowkv_settings INTERFACE -Werror)
endif()

if(WIN32)
    set(LOWKV_PLATFORM windows)
else()
    set(LOWKV_PLATFORM posix)
endif()

# All that a shared library shows. On Windows __declspec(dllexport) says so, on macOS the sources' default visibility.
function(lowkv_exports target map)
    if(NOT WIN32 AND NOT APPLE)
        target_link_options(${target} PRIVATE "LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/${map}")
        set_property(TARGET ${target} PROPERTY LINK_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${map}")
    endif()
endfunction()

# Tests that run under an emulator each time (test preset aarch64), and the target that builds only them.
add_custom_target(emulated)
function(lowkv_emulated test target)
    set_property(TEST ${test} APPEND PROPERTY LABELS emulated)
    add_dependencies(emulated ${target})
endfunction()

# Sets <out> to the .cpp files of the given folders, found again at each build so that a new file
# needs no edit here.
function(lowkv_sources out)
    set(patterns ${ARGN})
    list(TRANSFORM patterns PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
    list(TRANSFORM patterns APPEND "/*.cpp")
    file(GLOB found CONFIGURE_DEPENDS ${patterns})
    set(${out} ${found} PARENT_SCOPE)
endfunction()

# Sets <out> to a number of the headers by which the Python packages lowkv and lowkv-cuda know each other's objects:
# where it is the same, they are of the same sources.
function(lowkv_interface out)
    file(GLOB_RECURSE headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/lowkv/*.h" "${PROJECT_SOURCE_DIR}/src/*.h"
        "${PROJECT_SOURCE_DIR}/guests/*.h")
    list(FILTER headers EXCLUDE REGEX "/tests/")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers})
    set(all "${PROJECT_VERSION}")
    foreach(header ${headers})
        file(SHA256 "${header}" its)
        string(APPEND all ${its})
    endforeach()
    string(SHA256 all "${all}")
    set(${out} "${all}" PARENT_SCOPE)
endfunction()
