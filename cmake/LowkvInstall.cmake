# Installation: the library with its CMake package, the plug-in and the command.
if(NOT LOWKV_CORE)
    include(CMakePackageConfigHelpers)

    set(lowkv_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/lowkv")
    install(TARGETS ${lowkv_libraries} EXPORT lowkv-targets COMPONENT lowkv
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
    if(LOWKV_GUESTS)
        file(GLOB lowkv_guests "${PROJECT_SOURCE_DIR}/guests/*/include/lowkv")
    endif()
    install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/lowkv" ${lowkv_guests} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT lowkv)
    install(EXPORT lowkv-targets NAMESPACE lowkv:: DESTINATION "${lowkv_package_dir}" COMPONENT lowkv)
    configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/lowkv-config.cmake.in"
        "${PROJECT_BINARY_DIR}/lowkv-config.cmake" INSTALL_DESTINATION "${lowkv_package_dir}")
    write_basic_package_version_file("${PROJECT_BINARY_DIR}/lowkv-config-version.cmake" COMPATIBILITY SameMinorVersion)
    install(FILES "${PROJECT_BINARY_DIR}/lowkv-config.cmake" "${PROJECT_BINARY_DIR}/lowkv-config-version.cmake"
        DESTINATION "${lowkv_package_dir}" COMPONENT lowkv)
endif()

# The plug-in finds ggml in the program that loads it; the command finds llama.cpp where it was built. In an archive for
# other machines llama.cpp's libraries and OpenMP's are beside the plug-in, and the command looks there.
if(LOWKV_PORTABLE AND WIN32) # all in one folder, where Windows looks
    set(plugin_dir "${CMAKE_INSTALL_BINDIR}")
    foreach(library libllama ggml ggml-cpu ggml-base)
        install(FILES "${LOWKV_LLAMA_BUILD}/${library}.dll" DESTINATION ${plugin_dir} COMPONENT tools)
    endforeach()
elseif(LOWKV_PORTABLE)
    set(plugin_dir lib/lowkv)
    set(llama_dir "$ORIGIN/../lib/lowkv")
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libgomp.so.1
        OUTPUT_VARIABLE gomp OUTPUT_STRIP_TRAILING_WHITESPACE)
    file(REAL_PATH "${gomp}" gomp)
    install(FILES "${gomp}" DESTINATION ${plugin_dir} RENAME libgomp.so.1 COMPONENT tools)
    foreach(library llama ggml ggml-cpu ggml-base)
        file(REAL_PATH "${LOWKV_LLAMA_BUILD}/lib${library}.so" file)
        install(FILES "${file}" DESTINATION ${plugin_dir} RENAME lib${library}.so.0 COMPONENT tools)
    endforeach()
else()
    set(plugin_dir "${CMAKE_INSTALL_LIBDIR}")
    set(llama_dir "${LOWKV_LLAMA_BUILD}")
endif()
if(TARGET ggml-lowkv)
    install(TARGETS ggml-lowkv LIBRARY DESTINATION ${plugin_dir} COMPONENT tools)
endif()
if(TARGET lowkv_cli)
    set_property(TARGET lowkv_cli PROPERTY INSTALL_RPATH "${llama_dir}")
    install(TARGETS lowkv_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT tools)
    if(TARGET lowkv_trial)
        set_property(TARGET lowkv_trial PROPERTY INSTALL_RPATH "${llama_dir}")
        install(TARGETS lowkv_trial RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT tools)
    endif()
endif()
