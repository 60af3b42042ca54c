# Included by llama.cpp's project() (CMAKE_PROJECT_INCLUDE): the same libraries and tools in two thirds of the time.
#
# The graphs of its models are 150 sources of a second each, nearly all of it one header: sixteen at a time. What only
# parses and shows (options, chat templates, HTTP, pictures) is compiled with -O1; ggml and libllama keep -O3.

function(lowkv_build_faster)
    get_target_property(sources llama SOURCES)
    foreach(source ${sources})
        get_filename_component(file "${source}" ABSOLUTE BASE_DIR "${CMAKE_SOURCE_DIR}/src")
        set(own "src/models")
        if(source MATCHES "models/.*\\.cpp$" AND EXISTS "${file}")
            # Names that only this source has may be another's, too.
            file(STRINGS "${file}" own REGEX "^(static|namespace) " LIMIT_COUNT 1)
        endif()
        if(own)
            set_source_files_properties("${source}" TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
        endif()
    endforeach()
    set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    foreach(target llama-common mtmd server-context llama-server-impl llama-server cpp-httplib)
        if(TARGET ${target})
            target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
        endif()
    endforeach()
endfunction()
cmake_language(DEFER CALL lowkv_build_faster)
